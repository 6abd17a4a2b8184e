"""The programs of the page on the wire report send what it says."""

import json
import pathlib
import re
import subprocess

from absl.testing import parameterized
import pytest

import python_command

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'wire_report.md'
BLOCK = re.compile(r'^```(python|text)\n(.*?)^```', re.M | re.S)
# Not those of the page.
LINE = re.compile(r'(?:, )?[\w.<>]+:\d+| +source$|(?<=`) \(\)', re.M)

# Runs the blocks in one namespace, and prints what each has printed.
RUN_BLOCKS = """
import contextlib, io, json, sys
namespace, printed = {}, []
for block in json.load(sys.stdin):
  with contextlib.redirect_stdout(io.StringIO()) as out:
    exec(compile(block, 'train.py', 'exec'), namespace)
  printed.append(out.getvalue())
print(json.dumps(printed))
"""


def without_lines(text):
  text = LINE.sub('', text).replace(' ()', '')
  return '\n'.join(line.rstrip() for line in text.splitlines())


class WireReportPageTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_programs_send_what_the_page_says(self):
    blocks = BLOCK.findall(PAGE.read_text(encoding='utf-8'))
    shown = [block for kind, block in blocks if kind == 'text']

    run = subprocess.run(
        [*python_command.STRICT, '-c', RUN_BLOCKS],
        input=json.dumps([block for kind, block in blocks if kind == 'python']),
        capture_output=True,
        text=True,
        timeout=300,
    )
    self.assertEqual(run.returncode, 0, run.stderr)
    printed = [text for text in json.loads(run.stdout) if text]

    self.assertLen(shown, 3)
    self.assertEqual(
        list(map(without_lines, printed)), list(map(without_lines, shown))
    )
