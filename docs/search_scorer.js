// A page whose title has the words comes before one that has them in a heading,
// and a guide before a notebook. The numbers below are Sphinx's own.
var Scorer = {
  score: ([name, title, anchor, description, score]) => {
    const query = new URLSearchParams(window.location.search).get('q') || '';
    const words = query.toLowerCase().split(/[\s-]+/);
    const has = word => title.toLowerCase().includes(word);
    const notebook = name.startsWith('colabs/') ? 1 : 0;
    return score + (words.every(has) ? 20 : 0) - notebook;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
