"""A link of a known rate between two network namespaces of this machine.

Needs root, `ip` and `tc` of Linux. A rate is all that it has: no latency.
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess

ADDRESSES = ('10.99.0.1', '10.99.0.2')


def is_available() -> bool:
  """Whether this process may make one."""
  tools = all(shutil.which(tool) for tool in ('ip', 'tc'))
  if not tools or os.geteuid():
    return False
  name = f'shard{os.getpid()}x'
  made = subprocess.run(['ip', 'netns', 'add', name], capture_output=True)
  if made.returncode:
    return False
  subprocess.run(['ip', 'netns', 'del', name], check=True)
  return True


@contextlib.contextmanager
def shaped_link(rate: str) -> Iterator[list[list[str]]]:
  """Makes a link, and takes it down again whatever happens but SIGKILL.

  Args:
    rate: What each end sends at, as `tc` writes it: `'100mbit'`; `'none'` for
      what the machine can do.

  Yields:
    For each end, the words in front of a command that run it there.
  """
  # Other programs may have links of their own.
  names = [f'shard{os.getpid()}{end}' for end in 'ab']
  folders = [pathlib.Path('/etc/netns') / name for name in names]
  before = signal.signal(signal.SIGTERM, _end)
  try:
    for name, folder in zip(names, folders, strict=True):
      _run('ip', 'netns', 'add', name)
      # gloo listens on the address of the host's name.
      folder.mkdir(parents=True)
      own = ADDRESSES[names.index(name)]
      hosts = f'127.0.0.1 localhost\n{own} {socket.gethostname()}\n'
      (folder / 'hosts').write_text(hosts)
    first, second = names
    _run(
        *('ip', 'link', 'add', 'wire', 'netns', first),
        *('type', 'veth', 'peer', 'name', 'wire', 'netns', second),
    )
    for name, address in zip(names, ADDRESSES, strict=True):
      _bring_up(name, address, rate)
    yield [['ip', 'netns', 'exec', name] for name in names]
  finally:
    for name, folder in zip(names, folders, strict=True):
      # The link goes with either of its ends.
      subprocess.run(['ip', 'netns', 'del', name], capture_output=True)
      shutil.rmtree(folder, ignore_errors=True)
    signal.signal(signal.SIGTERM, before)


def _bring_up(name, address, rate):
  def run(words):
    _run('ip', 'netns', 'exec', name, *words.split())

  run('ip link set lo up')
  run(f'ip addr add {address}/30 dev wire')
  run('ip link set wire mtu 9000 up')
  if rate == 'none':
    return
  run('tc qdisc add dev wire root handle 1: htb default 10 r2q 1000')
  # Acknowledgements do not wait behind data, in a queue that never drops.
  for kind, speed, priority in (10, rate, 1), (20, '10gbit', 0):
    run(
        f'tc class add dev wire parent 1: classid 1:{kind} htb rate {speed}'
        f' ceil {speed} burst 128kb cburst 128kb quantum 60000 prio {priority}'
    )
  run('tc qdisc add dev wire parent 1:10 pfifo limit 1000')
  run(
      'tc filter add dev wire parent 1: protocol ip prio 1 u32'
      ' match u16 0x0000 0xff80 at 2 flowid 1:20'
  )


def _run(*command):
  subprocess.run(command, check=True, capture_output=True)


def _end(number, frame):
  del frame
  raise SystemExit(128 + number)
