"""Faulty mods. Most do one forbidden thing at their second token. Those with `attempt` print whether it succeeded."""

import ctypes
import fcntl
import gc
import hashlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

from thunder_mods import Added, mod


def at_second_token(name, work):
    """Creates a mod that does `work` once per run."""

    def handler(event, actions):
        if event.step == 2:
            return work()

    return mod(events=[Added], name=name)(handler)


def attempt(work):
    """Returns a function that prints whether the work succeeded."""

    def tried():
        try:
            print("done", work())
        except OSError as error:
            print("refused", type(error).__name__)

    return tried


def spin():
    while True:
        pass


def fill_memory():
    blocks = []
    while True:
        blocks.append(bytearray(1 << 25))


def flood():
    line = "x" * (1 << 20)
    for _ in range(256):
        print(line)


def flood_descriptors():
    line = b"x" * (1 << 20)
    for _ in range(256):
        os.write(2, line)


def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    return "forked"


def write():
    with open(os.path.join(os.getcwd(), "written"), "w") as file:
        file.write("x")
    return "written"


def grow():
    """Enlarges the memory that the server shares with this process."""
    for descriptor in range(3, 64):
        try:
            if "memfd" in os.readlink("/proc/self/fd/%d" % descriptor):
                os.ftruncate(descriptor, 1 << 27)
                return "grown"
        except FileNotFoundError:
            pass
    return "nothing found"


def set_flag(flag):
    """Sets a flag of the open file of the memory that the server shares with this process."""
    memory = next(found for found in gc.get_objects() if type(found).__name__ == "Memory")
    before = fcntl.fcntl(memory._descriptor, fcntl.F_GETFL)
    fcntl.fcntl(memory._descriptor, fcntl.F_SETFL, before | flag)
    return "set"


def lift():
    limit = resource.RLIM_INFINITY
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except ValueError:
        raise PermissionError from None
    return "lifted"


def system(number, *arguments):
    """Makes a system call by its x86-64 number."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, *(ctypes.c_long(argument) for argument in arguments)) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return "called"


def high_descriptors():
    """Returns the open descriptors above those that a worker may open itself."""
    found = []
    for descriptor in range(256, 4096):
        try:
            os.fstat(descriptor)
            found.append(descriptor)
        except OSError:
            pass
    return found


def start_threads(count):
    """Starts threads that wait, with small stacks, so that memory does not run out first."""
    threading.stack_size(32768)
    # glibc reserves an arena of 64 MiB for each of several threads.
    ctypes.CDLL(None).mallopt(-8, 1)
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def threads():
    """Starts more threads than permitted."""
    start_threads(600)
    threading.Event().wait()


def threads_that_log():
    """Sends log lines without a pause while more threads than permitted run."""
    start_threads(500)
    threading.Thread(target=start_threads, args=(100,), daemon=True).start()
    channel = next(found for found in gc.get_objects() if type(found).__name__ == "Channel")
    while True:
        channel.send({"kind": "log", "level": "INFO", "message": "x"})


def datagram(name):
    """Sends to a named socket from an unconnected one."""
    sender, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.sendto(b"x", name)
    return "sent"


def set_buffer(option):
    """Enlarges the kernel buffer of a socket."""
    sender, _ = socket.socketpair()
    sender.setsockopt(socket.SOL_SOCKET, option, 1 << 26)
    return sender.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def advise(advice):
    """Gives memory advice for its own page. Never run this outside the sandbox: it can remove memory from the machine."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    page = library.mmap(None, ctypes.c_size_t(4096), 3, 0x22, -1, ctypes.c_long(0))
    if library.madvise(ctypes.c_void_p(page), ctypes.c_size_t(4096), advice) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return "advised"


def forge(*frames):
    """Returns a function that sends messages which only the SDK sends, and then nothing for a while."""

    def send():
        channel = next(found for found in gc.get_objects() if type(found).__name__ == "Channel")
        for header, body in frames:
            channel.send_encoded(header, body)
        time.sleep(0.3)

    return send


def send_beginning(*lengths):
    """Returns a function that sends only the beginning of a frame, with these lengths."""

    def send():
        channel = next(found for found in gc.get_objects() if type(found).__name__ == "Channel")
        channel._socket.sendall(struct.pack("<II", *lengths))
        time.sleep(0.3)

    return send


REPLY = b'{"kind":"reply","action":%s,"exception":null,"elapsed_ns":1}'
FORCE = REPLY % b'{"type":"ForceTokens","tokens":[65]}'
MANY_TOKENS = b"[%s65]" % (b"65," * 99_999)
MANY_EDITS = bytes(8 * 100_000)
LONG_CALL = b'{"name":"f","arguments":{"text":"%s"}}' % (b"x" * (1 << 20))
PTRACE_ATTACH, NEW_USER, NEW_NET, THREAD = 16, 0x10000000, 0x40000000, 0x10000 | 0x800 | 0x100

stops = at_second_token("stops", lambda: os.kill(os.getpid(), signal.SIGSTOP))
many_threads = at_second_token("many_threads", threads)
huge_frame = at_second_token("huge_frame", send_beginning(0xFFFFFFFF, 0xFFFFFFFF))
half_a_frame = at_second_token("half_a_frame", lambda: (send_beginning(100, 100)(), os._exit(4)))
unknown_frame = at_second_token("unknown_frame", forge((b'{"kind":"loaded","handlers":[]}', b"")))
no_json = at_second_token("no_json", forge((b"[" * 100000, b"")))
odd_body = at_second_token("odd_body", forge((REPLY % b'{"type":"AdjustedLogits","edit":"set","temperature":null}', b"123")))
wrong_ids = at_second_token("wrong_ids", forge((REPLY % b'{"type":"ForceTokens","tokens":[-1,2147483647]}', b"")))
forces_too_many = at_second_token("forces_too_many", forge((REPLY % b'{"type":"ForceTokens","tokens":%s}' % MANY_TOKENS, b"")))
outputs_too_many = at_second_token("outputs_too_many", forge((REPLY % b'{"type":"ForceOutput","tokens":%s}' % MANY_TOKENS, b"")))
edits_too_many = at_second_token("edits_too_many", forge((REPLY % b'{"type":"AdjustedLogits","edit":"set","temperature":null}', MANY_EDITS)))
calls_too_long = at_second_token("calls_too_long", forge((REPLY % b'{"type":"ToolCalls","tool_calls":%s}' % LONG_CALL, b"")))
many_threads_log = at_second_token("many_threads_log", threads_that_log)
replies_early = at_second_token("replies_early", forge(*[(FORCE, b"")] * 5))

appends_to_memory = at_second_token("appends_to_memory", attempt(lambda: set_flag(os.O_APPEND)))
does_not_block = at_second_token("does_not_block", attempt(lambda: set_flag(os.O_NONBLOCK)))
own_memory = at_second_token("own_memory", attempt(lambda: open("/proc/self/mem", "rb").read(0)))
parents_memory = at_second_token("parents_memory", attempt(lambda: open("/proc/%d/mem" % os.getppid(), "rb").read(0)))
parents_folder = at_second_token("parents_folder", attempt(lambda: len(os.listdir("/proc/%d" % os.getppid()))))
parents_limits = at_second_token("parents_limits", attempt(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)))
traces = at_second_token("traces", attempt(lambda: system(101, PTRACE_ATTACH, os.getppid(), 0, 0)))
reads_processes = at_second_token("reads_processes", attempt(lambda: system(310, os.getppid(), 0, 0, 0, 0, 0)))
io_ring = at_second_token("io_ring", attempt(lambda: system(425, 8, 0)))
makes_memory = at_second_token("makes_memory", attempt(lambda: os.memfd_create("x")))
new_user = at_second_token("new_user", attempt(lambda: system(272, NEW_USER)))
threads_net = at_second_token("threads_net", attempt(lambda: system(56, THREAD | NEW_NET, 0, 0, 0, 0)))
abstract_socket = at_second_token("abstract_socket", attempt(lambda: datagram("\0thunder-nobody")))
named_socket = at_second_token("named_socket", attempt(lambda: datagram("/nowhere/socket")))
SO_SNDBUFFORCE, MADV_HWPOISON, MADV_MERGEABLE, MADV_DONTNEED = 32, 100, 12, 4
forces_buffer = at_second_token("forces_buffer", attempt(lambda: set_buffer(SO_SNDBUFFORCE)))
enlarges_buffer = at_second_token("enlarges_buffer", attempt(lambda: set_buffer(socket.SO_SNDBUF)))
poisons_memory = at_second_token("poisons_memory", attempt(lambda: advise(MADV_HWPOISON)))
merges_memory = at_second_token("merges_memory", attempt(lambda: advise(MADV_MERGEABLE)))
frees_memory = at_second_token("frees_memory", attempt(lambda: advise(MADV_DONTNEED)))
endless = at_second_token("endless", spin)
memory_bomb = at_second_token("memory_bomb", fill_memory)
segfault = at_second_token("segfault", lambda: ctypes.string_at(0))
exits = at_second_token("exits", lambda: os._exit(3))
prints = at_second_token("prints", flood)
writes_past_python = at_second_token("writes_past_python", flood_descriptors)
wrong_type = at_second_token("wrong_type", lambda: 3)
forks = at_second_token("forks", attempt(fork))
spawns = at_second_token("spawns", attempt(lambda: subprocess.check_output(["/bin/echo", "spawned"])))
replaces_itself = at_second_token("replaces_itself", attempt(lambda: os.execv("/bin/echo", ["echo", "replaced"])))
opens_sockets = at_second_token("opens_sockets", attempt(lambda: socket.socket().family))
looks_up_names = at_second_token("looks_up_names", attempt(lambda: socket.getaddrinfo("localhost", 80)))
reads_files = at_second_token("reads_files", attempt(lambda: open("/etc/passwd").read(4)))
lists_folders = at_second_token("lists_folders", attempt(lambda: len(os.listdir("/"))))
sees_processes = at_second_token("sees_processes", attempt(lambda: open("/proc/%d/cmdline" % os.getppid()).read(4)))
writes_files = at_second_token("writes_files", attempt(write))
makes_folders = at_second_token("makes_folders", attempt(lambda: os.mkdir("made")))
signals = at_second_token("signals", attempt(lambda: os.kill(os.getppid(), 0)))
lifts_limits = at_second_token("lifts_limits", attempt(lift))
grows_memory = at_second_token("grows_memory", attempt(grow))
reads_thread_limit = at_second_token("reads_thread_limit", attempt(lambda: resource.getrlimit(resource.RLIMIT_NPROC)[1]))
inherits = at_second_token("inherits", attempt(high_descriptors))
starts_threads = at_second_token("starts_threads", attempt(lambda: threading.Thread(target=time.time).start()))


@mod
def always_raises(event, actions):
    """Fails for every event."""
    raise ValueError("never")


@mod(events=[Added])
def hangs_for_some(event, actions):
    """Never replies in a run with a limit of two tokens, and counts in the others."""
    if event.max_steps == 2:
        spin()
    print("token", event.step)


def compute_between_calls():
    """Uses several processors: a single thread may get little of a busy one."""
    hash_for_hours = lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
    for _ in range(8):
        threading.Thread(target=hash_for_hours, daemon=True).start()


computes_between_calls = at_second_token("computes_between_calls", compute_between_calls)

@mod(events=[Added])
def sleeps(event, actions):
    """Sleeps at every token."""
    time.sleep(0.4)


state = {}


@mod(events=[Added])
def remembers(event, actions):
    """Holds a megabyte for every request until its run has finished."""
    memory = state.setdefault(event.request_id, bytearray(1 << 20))
    memory[event.step] = 1
    print(len(state), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def finished(request_id):
    if state.pop(request_id, None) == "threads":
        threading.Thread(target=threads, daemon=True).start()


@mod(events=[Added])
def many_threads_later(event, actions):
    """Starts more threads than permitted after its run."""
    state[event.request_id] = "threads"


@mod(events=[Added])
def prints_process_id(event, actions):
    """Prints the id of its process."""
    print(os.getpid(), sys.version_info[0])
