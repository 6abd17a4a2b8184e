"""Runs the code of pages, each in a process where JAX is already imported.

A line of the input has a folder, the name of a page, and its blocks: pairs of
the number of a line and code. The blocks of a page share a namespace, as if a
reader pasted one after the other. The file `printed.json` of the folder gets
what each block prints, and `errors` what goes to stderr. A line of the output
is the exit status of a page.

The pages are forks of this process, so that they do not share a backend, a
setting or a mesh, and do not spend the time that it takes to import JAX.
"""

import contextlib
import io
import json
import os
import signal
import sys

# For the pages.
import jax  # noqa: F401
import optax  # noqa: F401

import shard_transforms  # noqa: F401

SECONDS = 300


def run_page(page, blocks):
  """Returns what each block prints."""
  namespace, printed = {'__name__': '__main__'}, []
  for line, code in blocks:
    with contextlib.redirect_stdout(io.StringIO()) as out:
      exec(compile('\n' * line + code, page, 'exec'), namespace)
    printed.append(out.getvalue())
  return printed


def main():
  for request in sys.stdin:
    folder, page, blocks = json.loads(request)
    pid = os.fork()
    if pid == 0:
      signal.alarm(SECONDS)
      os.chdir(folder)
      os.dup2(os.open('errors', os.O_CREAT | os.O_WRONLY), 2)
      with open('printed.json', 'w') as file:
        json.dump(run_page(page, blocks), file)
      return
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == '__main__':
  main()
