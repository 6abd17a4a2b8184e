"""The programs of the page on compiled programs send what it says."""

import contextlib
import io
import pathlib
import re

from absl.testing import parameterized
import pytest

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'compiled_programs.md'
BLOCK = re.compile(r'^```(python|text)\n(.*?)^```', re.M | re.S)
# Not those of the page, and of old ones where JAX finds a program in its cache.
LINE = re.compile(r'(?:, )?[\w.<>]+:\d+| +source$|(?<=`) \(\)', re.M)


def without_lines(text):
  text = LINE.sub('', text).replace(' ()', '')
  return '\n'.join(line.rstrip() for line in text.splitlines())


class CompiledProgramsTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_programs_send_what_the_page_says(self):
    blocks = BLOCK.findall(PAGE.read_text(encoding='utf-8'))
    namespace, printed, shown = {}, [], []

    for kind, block in blocks:
      if kind == 'text':
        shown.append(block)
        continue
      with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(block, 'train.py', 'exec'), namespace)
      if out.getvalue():
        printed.append(out.getvalue())

    self.assertLen(shown, 4)
    self.assertEqual(
        list(map(without_lines, printed)), list(map(without_lines, shown))
    )
