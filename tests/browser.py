"""A headless browser that visits a site on loopback."""

import contextlib
import functools
import http.server
import json
import pathlib
import queue
import shutil
import subprocess
import tempfile
import threading

VISITOR = pathlib.Path(__file__).with_name('site_visitor.html')
NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
FLAGS = (
    '--headless=new',
    '--no-sandbox',
    '--disable-gpu',
    '--disable-dev-shm-usage',
    '--no-first-run',
    # Nothing but the site itself is there.
    '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1',
)
# Comes first in each page, and notes what goes wrong in it.
NOTES = b"""<head><script>
window.siteProblems = [];
const note = problem => window.siteProblems.push(String(problem));
window.addEventListener('error', event => note(
    event.message || 'not loaded: ' + (event.target.src || event.target.href)
), true);
window.addEventListener('unhandledrejection', event => note(event.reason));
console.error = (...words) => note(words.join(' '));
</script>"""


def find():
  """Returns the path of a browser, or `None`."""
  return next(filter(None, map(shutil.which, NAMES)), None)


class _Handler(http.server.SimpleHTTPRequestHandler):
  """Serves a site and the page that visits it; receives what that finds."""

  def __init__(self, *args, results, searches, **kwargs):
    self.results, self.searches = results, searches
    super().__init__(*args, **kwargs)

  def do_GET(self):
    path = pathlib.Path(self.translate_path(self.path))
    if self.path == '/visitor':
      self._answer(VISITOR.read_bytes())
    elif self.path == '/pages.json':
      self._answer(json.dumps(pages(self.directory)).encode())
    elif self.path == '/searches.json':
      self._answer(json.dumps(self.searches).encode())
    elif path.suffix == '.html' and path.is_file():
      self._answer(path.read_bytes().replace(b'<head>', NOTES, 1))
    else:
      super().do_GET()

  def do_POST(self):
    body = self.rfile.read(int(self.headers['Content-Length']))
    self._answer(b'')
    self.results.put(json.loads(body))

  def log_message(self, *args):
    del args

  def _answer(self, content):
    self.send_response(200)
    self.send_header('Content-Type', 'text/html; charset=utf-8')
    self.send_header('Content-Length', str(len(content)))
    self.end_headers()
    self.wfile.write(content)


class _Server(http.server.ThreadingHTTPServer):

  def handle_error(self, request, client_address):
    # A browser that is ended leaves requests behind.
    del request, client_address


def pages(site):
  """Returns the addresses of all pages of a site."""
  names = (p.relative_to(site) for p in pathlib.Path(site).rglob('*.html'))
  return sorted(f'/{n.as_posix()}' for n in names if n.parts[0] != '_static')


@contextlib.contextmanager
def _serving(site, results, searches):
  """Yields the address of a site, and of the page that visits it."""
  handler = functools.partial(
      _Handler, results=results, searches=searches, directory=str(site)
  )
  with _Server(('127.0.0.1', 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
      yield f'http://127.0.0.1:{server.server_port}'
    finally:
      server.shutdown()


def visit(site, browser, timeout, searches=()):
  """Returns what a browser finds on the pages of a site, and by its search."""
  results = queue.Queue()
  with (
      tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
      _serving(site, results, searches) as address,
      subprocess.Popen(
          [browser, *FLAGS, f'--user-data-dir={profile}', f'{address}/visitor'],
          stdout=subprocess.DEVNULL,
          stderr=subprocess.DEVNULL,
      ) as process,
  ):
    try:
      return address, results.get(timeout=timeout)
    finally:
      process.terminate()
