"""Settings of Sphinx, which makes the pages of the site."""

import html
import itertools
import pathlib
import re

from docutils import nodes

import shard_transforms

project = 'shard_transforms'
author = 'The shard_transforms authors'
copyright = f'2026, {author}'
release = version = shard_transforms.__version__

extensions = [
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
    'sphinx_copybutton',
    # Formulas without asking another server.
    'sphinx-mathjax-offline',
]
exclude_patterns = ['_build']

html_theme = 'sphinx_book_theme'
html_title = f'{project} {version}'
html_favicon = 'images/favicon.svg'
html_static_path = ['_static']
html_css_files = ['site.css']
html_search_scorer = str(pathlib.Path(__file__).with_name('search_scorer.js'))
# The sidebar has the search already.
html_theme_options = {
    'show_toc_level': 2,
    'navbar_persistent': [],
    'extra_footer': (
        f'{project} {version}, '
        '<a href="https://www.apache.org/licenses/LICENSE-2.0">'
        'Apache License 2.0</a>'
    ),
}
# What a block prints is no code to copy.
copybutton_selector = 'div:not(.highlight-text) > div.highlight > pre'
# Else the theme logs an error when somebody comes for the first time.
html_context = {'default_mode': 'auto'}

# Blocks of pages are executed by the tests, and notebooks hold their results.
nb_execution_mode = 'off'
myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 3

# Messages of errors are quoted as they are.
smartquotes = False
# As docstrings have names.
default_role = 'code'
autodoc_typehints = 'none'
autodoc_member_order = 'alphabetical'
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
maximum_signature_line_length = 60
add_module_names = False


def _skip(app, what, name, obj, skip, options):
  del app, options
  # Fields are among the attributes that the docstring of a class lists.
  is_field = type(obj).__name__ == '_tuplegetter'
  return skip or is_field or (what == 'class' and name == 'rules')


def _write_plurals(app, what, name, obj, options, lines):
  del app, what, name, obj, options
  # What follows a name at once must be told apart from it.
  plural = re.compile(r'(`[^`]+`)([a-z]?)')
  # All names are matched, so that what stands between two of them is none.
  lines[:] = [
      plural.sub(lambda m: rf'{m[1]}\ {m[2]}' if m[2] else m[1], line)
      for line in lines
  ]


def _describe(app, pagename, templatename, context, doctree):
  """Gives a page its first paragraph as a description, for search engines."""
  del app, pagename, templatename
  paragraph = doctree and next(doctree.findall(nodes.paragraph), None)
  if paragraph:
    text = html.escape(' '.join(paragraph.astext().split())[:300])
    context['metatags'] += f'<meta name="description" content="{text}">'


def _break_names(body):
  """Lets a browser break long names, after dots, underscores and brackets."""
  name = re.compile(r'(?<=<span class="pre">)[^<]{19,}')
  return name.sub(
      lambda m: re.sub(r'(?<=\w{4})([._(=/]+)(?=\w)', r'\1<wbr>', m[0]), body
  )


def _label_cells(body):
  """Gives the cells of tables with long texts the headings of their columns.

  On phones, the rows of such a table stand one below the other.
  """

  def labelled(table):
    head, _, rows = table[0].partition('</thead>')
    titles = [_text(x) for x in re.findall(r'<th\b.*?</th>', head, re.S)]
    cells = re.findall(r'<td\b.*?</td>', rows, re.S)
    # Numbers are compared in columns, where they stay.
    if not titles or all(len(_text(cell)) < 25 for cell in cells):
      return table[0]
    labels = [
        html.escape(title) if _text(cell) else ''
        for title, cell in zip(itertools.cycle(titles), cells)
    ]
    label = iter(labels)
    rows = re.sub('<td', lambda _: f'<td data-label="{next(label)}"', rows)
    return f'{head}</thead>{rows}'.replace('class="', 'class="stacked ', 1)

  return re.sub(r'<table\b.*?</table>', labelled, body, flags=re.S)


def _wrap_sentences(body):
  """Marks outputs with a sentence, which break their lines; tables scroll."""

  def marked(block):
    longest = max(len(_text(line)) for line in block[0].splitlines())
    kind = 'highlight-text' + ' sentences' * (longest > 110)
    return block[0].replace('highlight-text', kind, 1)

  blocks = r'<div class="highlight-text .*?</pre>'
  return re.sub(blocks, marked, body, flags=re.S)


def _text(cell):
  return html.unescape(re.sub('<[^>]+>', '', cell)).strip()


def _draw(body):
  """Puts drawings into the page, whose light or dark mode they then have."""

  def drawing(image):
    path = pathlib.Path(__file__).with_name('images') / image[1]
    narrow = path.with_stem(f'{path.stem}_narrow')
    if not narrow.exists():
      return path.read_text('utf-8')
    return ''.join(
        f'<div class="{kind}">{file.read_text("utf-8")}</div>'
        for kind, file in (('wide', path), ('narrow', narrow))
    )

  return re.sub(r'<img [^>]*_images/(\w+\.svg)"[^>]*>', drawing, body)


def _back(body):
  """Leads from the source to the page of the namespace that has the name.

  Sphinx takes the first namespace that has a name of the file.
  """
  link = re.compile(
      r'(reference/(?!shard_transforms\.)(\w+)\.html#shard_transforms\.)\w+\.'
  )
  return link.sub(r'\1\2.', body)


def _finish(app, pagename, templatename, context, doctree):
  del app, templatename, doctree
  body = context.get('body', '')
  if pagename.startswith('_modules/'):
    body = _back(body)
  body = _wrap_sentences(_label_cells(_break_names(body)))
  context['body'] = _draw(body)


def setup(app):
  """Tells Sphinx how docstrings are read, and pages are described."""
  app.connect('autodoc-process-docstring', _write_plurals)
  app.connect('autodoc-skip-member', _skip)
  app.connect('html-page-context', _describe)
  app.connect('html-page-context', _finish)
