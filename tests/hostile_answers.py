"""Answers for the sandbox tests: hostile ones by what they try, and unusual ones that are right.

A program without a function `f` gets a wrong one behind it, so nothing here passes honestly except in RIGHT. The
programs are text and run in the sandbox only. Names in capitals are filled in by the test: NAP (seconds that outlive
every limit, as a string), TAG (a file name), PLACES (folders outside), VICTIM (a file outside), PORT (somebody
listens there), SPARE (nobody does), HARNESS (the process id of the test).
"""

WRITE_ALL = """
import os
def write_all(data):
    for fd in range(64):
        try:
            os.write(fd, data)
        except OSError:
            pass
"""

# `load` makes an extension module from its file under another name, and puts it where imports find it
LOAD = """
import glob, importlib.machinery, importlib.util, os, sys
class Own(str):
    __hash__ = str.__hash__
    def __eq__(self, other):
        return False
    def rpartition(self, mark):
        return "", "", "math"
def load(name, stem):
    path = glob.glob(os.path.dirname(os.__file__) + "/lib-dynload/" + stem + "*.so")[0]
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    spec.name = name
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[stem] = module
"""

# The token off the evaluation stack of `main`
READ_STACK = """
import ctypes
def f(x):
    return x
frame = sys._getframe()
while frame.f_code.co_name != "main":
    frame = frame.f_back
word = ctypes.c_size_t
inner = word.from_address(id(frame) + 24).value
for k in range(40):
    at = word.from_address(inner + 72 + 8 * k).value
    if at < 4096 or at % 8:
        continue
    if word.from_address(at + 8).value == id(bytes) and word.from_address(at + 16).value == 64:
        os.write(int(frame.f_locals["control"]), ctypes.string_at(at + 32, 64) + b"\\n")
        break
"""

# Each wants to be taken for a right answer
FORGERIES = {
    "sys.exit": """
import sys
def f(x):
    sys.exit(0)
""",
    "os._exit": """
import os
def f(x):
    os._exit(0)
""",
    "SystemExit": """
def f(x):
    raise SystemExit(0)
""",
    "quit": """
def f(x):
    quit()
""",
    "exit": """
def f(x):
    exit(0)
""",
    "exit while loading": """
import sys
sys.exit(0)
""",
    "atexit": """
import atexit, os
atexit.register(os._exit, 0)
""",
    "prints its own program": """
import sys
ME = 'def f(x):\\n    return x\\nassert f(1) == 2\\nassert f(2) == 3\\npassed'
print(ME)
print(ME, file=sys.stderr)
sys.exit(0)
""",
    "prints the runner": """
import __main__, sys, inspect
print(inspect.getsource(__main__))
sys.exit(0)
""",
    "writes passed everywhere": WRITE_ALL
    + """
for w in (b'passed\\n', b'ok\\n', b'ready\\npassed\\n', b'1\\n'):
    write_all(w)
os._exit(0)
""",
    "echoes every channel": WRITE_ALL
    + """
import fcntl
for fd in range(64):
    try:
        os.set_blocking(fd, False)
        write_all(os.read(fd, 4096) + b"\\n")
    except OSError:
        pass
os._exit(0)
""",
    "dumps all frames": WRITE_ALL
    + """
import sys
def strings(thing, depth=0):
    if isinstance(thing, (str, bytes)):
        yield thing.encode() if isinstance(thing, str) else thing
    elif depth < 4 and isinstance(thing, (list, tuple, set, dict)):
        for part in list(thing.values()) if isinstance(thing, dict) else thing:
            yield from strings(part, depth + 1)
def f(x):
    frame, found = sys._getframe(), set()
    while frame:
        for thing in (frame.f_locals, frame.f_globals, frame.f_code.co_consts):
            found.update(s for s in strings(thing) if len(s) == 64)
        frame = frame.f_back
    for s in found:
        write_all(s + b"\\n")
    os._exit(0)
""",
    "frames of an exception": WRITE_ALL
    + """
def f(x):
    try:
        1 / 0
    except ZeroDivisionError as e:
        frame = e.__traceback__.tb_frame
        while frame:
            for v in list(frame.f_locals.values()):
                if isinstance(v, bytes):
                    write_all(v)
            frame = frame.f_back
    os._exit(0)
""",
    "memory by gc": WRITE_ALL
    + """
import gc
def f(x):
    for thing in gc.get_objects():
        for part in gc.get_referents(thing):
            if isinstance(part, bytes) and len(part) == 64:
                write_all(part + b"\\n")
    os._exit(0)
""",
    "frames of all threads": """
import sys
def f(x):
    print(sys._current_frames())
    return x
""",
    "trace that skips lines": """
import sys
def tracer(frame, event, arg):
    frame.f_lineno += 1
    return tracer
def f(x):
    frame = sys._getframe(1)
    frame.f_trace = tracer
    sys.settrace(tracer)
    return x
""",
    "ctypes": """
import ctypes
""",
    "ctypes in a package": LOAD
    + """
load("x._ctypes", "_ctypes")
"""
    + READ_STACK,
    "ctypes with a hyphen": LOAD
    + """
load("-ctypes", "_ctypes")
"""
    + READ_STACK,
    "ctypes with a NUL": LOAD
    + """
load("_ctypes\\0x", "_ctypes")
"""
    + READ_STACK,
    "ctypes by a string of its own": LOAD
    + """
load(Own("_ctypes"), "_ctypes")
"""
    + READ_STACK,
    "hook without code": LOAD
    + """
import __main__
__main__._proof_guard.__code__ = (lambda *a: None).__code__
load("_ctypes", "_ctypes")
"""
    + READ_STACK,
    "audit hook of its own": """
import sys
sys.addaudithook(lambda e, a: None)
""",
    "patched builtins": """
import builtins
builtins.AssertionError = SystemExit
builtins.exec = builtins.eval = builtins.compile = lambda *a, **k: None
builtins.abs = lambda x: 0
builtins.all = builtins.any = lambda x: True
builtins.list = builtins.map = lambda *a: []
builtins.BaseException = builtins.Exception = ZeroDivisionError
def f(x):
    return x
""",
    "a softer abs": """
def abs(x):
    return 0
""",
    "own AssertionError": """
class AssertionError(Exception): pass
""",
    "own check and tests": """
def check(*a):
    pass
candidate = None
__builtins__ = {}
""",
    "patched runner": """
import __main__, os
for name in ("_prepare", "_reason", "_token", "_read"):
    setattr(__main__, name, lambda *a: "passed")
__main__._reason = lambda e: "passed"
real = os.write
os.write = lambda fd, data: real(fd, b"passed\\n")
os._exit = lambda code: None
def f(x):
    return x
""",
    "patched finish": """
import __main__
__main__._finish.__code__ = (lambda w, c, t, r: w(c, t)).__code__
""",
    "namespaces of the runner": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for v in list(frame.f_locals.values()):
            if isinstance(v, tuple):
                for part in v:
                    if isinstance(part, dict):
                        part["f"] = None
        frame = frame.f_back
    raise SystemExit(0)
""",
    "fork and leave": """
import os
if os.fork():
    os._exit(0)
""",
    "fork inside": """
import os
def f(x):
    if os.fork() == 0:
        return x
    os._exit(0)
""",
    "becomes another program": """
import os
os.execv('/bin/true', ['true'])
""",
    "kills its parent": """
import os
os.kill(os.getppid(), 9)
""",
    "kills itself": """
import os
os.kill(os.getpid(), 9)
""",
    "stops itself": """
import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
""",
    "stops the harness": """
import os
os.kill(HARNESS, 19)
""",
    "closes its files": """
import os
os.closerange(0, 256)
""",
    "swaps its files": """
import os
r, w = os.pipe()
for fd in range(3, 32):
    try:
        os.dup2(w, fd)
    except OSError:
        pass
""",
    "KeyboardInterrupt": """
def f(x):
    raise KeyboardInterrupt
""",
    "delayed exit": """
import os, threading, time
threading.Timer(0.2, os._exit, (0,)).start()
def f(x):
    time.sleep(5)
""",
    "signal handler": """
import os, signal
signal.signal(signal.SIGALRM, lambda s, fr: os._exit(0))
signal.setitimer(0, 0.1)
def f(x):
    while True:
        pass
""",
    "another stdout": """
import sys
class Out:
    def write(self, s):
        raise SystemExit(0)
    flush = write
sys.stdout = sys.stderr = Out()
""",
    "eq raises SystemExit": """
class R:
    def __eq__(self, o):
        raise SystemExit(0)
def f(x):
    return R()
""",
    "name of an error": """
class M(type):
    __name__ = property(lambda s: 'x\\npassed')
class E(Exception, metaclass=M): pass
def f(x):
    raise E
""",
    "modules swept": """
import sys
sys.modules.clear()
sys.path.clear()
""",
    "exception group": """
def f(x):
    raise BaseExceptionGroup('g', [SystemExit(0)])
""",
}

# Each wants to run for ever
ENDLESS = {
    "loop": """
def f(x):
    while True:
        pass
""",
    "stubborn loop": """
def f(x):
    while True:
        try:
            while True:
                pass
        except:
            pass
""",
    "sleep": """
import time
def f(x):
    time.sleep(10**6)
""",
    "huge number": """
def f(x):
    return 10**10**9
""",
    "backtracking": """
import re
def f(x):
    return re.match('(a+)+$', 'a' * 60 + 'b')
""",
    "deaf": """
import signal
for s in range(1, 65):
    try:
        signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
def f(x):
    while True:
        pass
""",
    "threads": """
import threading
def spin():
    while True:
        pass
for _ in range(4):
    threading.Thread(target=spin).start()
def f(x):
    spin()
""",
}

# Each wants more than its share
GREEDY = {
    "big list": """
x = [0] * 10**10
def f(x):
    return x + 1
""",
    "growing": """
def f(x):
    a = []
    while True:
        a.append(bytearray(1 << 20))
""",
    "output": """
def f(x):
    while True:
        print('a' * 1000)
""",
    "output by write": """
import os
def f(x):
    while True:
        os.write(2, b'a' * 65536)
""",
    "recursion": """
def f(x):
    return f(x)
""",
    "deep recursion": """
import sys
sys.setrecursionlimit(10**9)
def f(x):
    return [f(x)]
""",
    "deep source": "x = " + "(" * 5000 + ")" * 5000,
    "nested repr": """
def f(x):
    a = []
    for _ in range(10**6):
        a = [a]
    return repr(a)
""",
    "fork bomb": """
import os
def f(x):
    while True:
        os.fork()
""",
    "memory of many": """
import os, time
def f(x):
    for _ in range(8):
        if os.fork() == 0:
            break
    a = bytearray(100 << 20)
    a[::4096] = b'x' * len(a[::4096])
    time.sleep(60)
""",
    "thread bomb": """
import threading, time
def f(x):
    while True:
        threading.Thread(target=time.sleep, args=(60,)).start()
""",
    "fills the disk": """
import tempfile
def f(x):
    keep = []
    while True:
        keep.append(tempfile.NamedTemporaryFile())
        while True:
            try:
                keep[-1].write(b'0' * (1 << 20)); keep[-1].flush()
            except OSError:
                break
        if len(keep) > 100:
            return x
""",
}

# Each wants to leave something outside
OUTBREAKS = {
    "daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        os.execv('/bin/sleep', ['sleep', NAP])
    os._exit(0)
""",
    "daemon without a mark": """
import subprocess
subprocess.Popen(['/bin/sleep', NAP], env={}, start_new_session=True)
""",
    "shell": """
import os
os.system('nohup sleep ' + NAP + ' >/dev/null 2>&1 &')
""",
    "spawn": """
import os
os.posix_spawn('/bin/sleep', ['sleep', NAP], {}, setsid=True)
""",
    "multiprocessing": """
import multiprocessing, time
multiprocessing.get_context('fork').Process(target=time.sleep, args=(int(NAP),)).start()
""",
    "writes outside": """
import os
for p in PLACES:
    try:
        open(p + '/' + TAG, 'w').write('x')
    except OSError:
        pass
try:
    open(VICTIM, 'w')
except OSError:
    pass
""",
    "makes folders": """
import os
for p in PLACES:
    try:
        os.makedirs(p + '/' + TAG + '/x')
    except OSError:
        pass
""",
    "deletes": """
import os, shutil
shutil.rmtree(os.path.dirname(VICTIM), ignore_errors=True)
try:
    os.remove(VICTIM)
except OSError:
    pass
""",
    "renames": """
import os
try:
    os.rename(VICTIM, VICTIM + '2')
except OSError:
    pass
""",
    "chmod": """
import os
try:
    os.chmod(VICTIM, 0o777)
except OSError:
    pass
try:
    os.setuid(0)
except OSError:
    pass
""",
    "symlink": """
import os
try:
    os.symlink(VICTIM, 'link')
    open('link', 'w').write('x')
except OSError:
    pass
""",
    "symlink to a folder": """
import os, tempfile
try:
    d = tempfile.mkdtemp()
    os.symlink('/var/tmp', d + '/l')
    open(d + '/l/' + TAG, 'w')
except OSError:
    pass
""",
    "path with dots": """
import os
try:
    open('../../../../../../var/tmp/' + TAG, 'w')
except OSError:
    pass
""",
    "ctypes in a package": LOAD
    + """
load("x._ctypes", "_ctypes")
import ctypes
for p in PLACES:
    ctypes.CDLL(None).open((p + '/' + TAG).encode(), os.O_CREAT | os.O_WRONLY, 0o644)
""",
    "processes in a package": LOAD
    + """
load("x._posixsubprocess", "_posixsubprocess")
import subprocess
subprocess.Popen(['/bin/sleep', NAP], start_new_session=True)
""",
    "posix once more": """
import sys
sys.modules.pop('posix')
import posix
for p in PLACES:
    try:
        posix.mkfifo(p + '/' + TAG)
    except OSError:
        pass
""",
    "posix by its loader": """
import importlib.machinery, importlib.util
posix = importlib.util.module_from_spec(importlib.machinery.BuiltinImporter.find_spec('posix'))
for p in PLACES:
    try:
        posix.mkfifo(p + '/' + TAG)
    except OSError:
        pass
""",
    "softer isinstance and bool": """
import builtins
real = vars(builtins).copy()
builtins.isinstance, builtins.bool = lambda *a: True, lambda x: False
for p in PLACES:
    try:
        open(p + '/' + TAG, 'w')
    except OSError:
        pass
vars(builtins).update(real)
""",
    "flags of zero": """
import os
flags = os.O_WRONLY | os.O_CREAT
os.O_WRONLY = os.O_RDWR = os.O_CREAT = os.O_TRUNC = 0
for p in PLACES:
    try:
        os.open(p + '/' + TAG, flags)
    except OSError:
        pass
""",
    "below an open folder": """
import os
for p in PLACES:
    try:
        os.open(TAG, os.O_WRONLY | os.O_CREAT, dir_fd=os.open(p, os.O_RDONLY))
    except OSError:
        pass
""",
    "string of its own": """
class Own(str):
    def startswith(self, start):
        return False
    def split(self, mark):
        return []
for p in PLACES:
    try:
        open(Own(p + '/' + TAG), 'w')
    except OSError:
        pass
""",
    "cells of the hook": """
def refused():
    try:
        open(PLACES[0] + '/' + TAG, 'w')
    except OSError as e:
        return e.__traceback__
step = refused()
while step.tb_next:
    step = step.tb_next
for thing in step.tb_frame.f_locals.values():
    for cell in getattr(thing, '__closure__', None) or ():
        if isinstance(cell.cell_contents, str):
            cell.cell_contents = '/'
refused()
""",
    "attached database": """
import sqlite3
for p in PLACES:
    try:
        c = sqlite3.connect(':memory:')
        c.execute("attach database '" + p + '/' + TAG + "' as x")
        c.execute('create table x.t (a)')
    except sqlite3.Error:
        pass
""",
    "history of readline": """
import readline
for p in PLACES:
    try:
        readline.write_history_file(p + '/' + TAG)
    except OSError:
        pass
""",
    "Tcl": """
import tkinter
tkinter.Tcl().eval('exec sleep ' + NAP + ' &')
""",
    "locked folder": """
import os
os.makedirs('a/b')
open('a/b/c', 'w')
try:
    os.chmod('a', 0)
except OSError:
    pass
""",
    "listens": """
import socket, time, threading
s = socket.socket()
s.bind(('127.0.0.1', SPARE))
s.listen()
""",
    "connects": """
import socket
try:
    socket.create_connection(('127.0.0.1', PORT), 1).send(b'x')
except OSError:
    pass
""",
}

# Each is right, in an unusual way
RIGHT = {
    "plain": """
def f(x):
    return x + 1
""",
    "main guard": """
def f(x):
    return x + 1
import sys
if __name__ == '__main__':
    sys.exit(0)
""",
    "prints": """
def f(x):
    return x + 1
print('x' * 10000)
""",
    "dataclass": """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class P:
    x: int
def f(x):
    return P(x + 1).x
""",
    "deep": """
import sys
sys.setrecursionlimit(20000)
def f(x):
    def g(n):
        return g(n - 1) if n else x + 1
    return g(9000)
""",
    "numpy": """
import numpy as np
def f(x):
    return int(np.array([x, 1]).sum())
""",
    "asyncio": """
import asyncio
async def g(x):
    await asyncio.sleep(0)
    return x + 1
def f(x):
    return asyncio.run(g(x))
""",
    "temporary file": """
import tempfile
def f(x):
    with tempfile.TemporaryDirectory() as d:
        open(d + '/a', 'w').write('x')
    return x + 1
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
def f(x):
    with ThreadPoolExecutor(4) as p:
        return list(p.map(lambda v: v + 1, [x]))[0]
""",
    "reports errors": """
import logging, traceback, warnings
def f(x):
    try:
        1 / 0
    except ZeroDivisionError:
        traceback.print_exc()
        logging.exception('x')
        warnings.warn('w')
    return x + 1
""",
    "own max": """
def max(*a):
    return 0
def f(x):
    return x + 1 + max(7)
""",
    "time zones": """
import zoneinfo
def f(x):
    return x + 1
""",
    "unused imports": """
import bisect, collections, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json, math, os
import random, re, statistics, string, subprocess, sys, typing
def f(x):
    return x + 1
""",
    "lingering thread": """
import threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
def f(x):
    return x + 1
""",
    "at exit": """
import atexit, os
atexit.register(os._exit, 1)
def f(x):
    return x + 1
""",
}
