"""Entry point of a mod's worker process: moves the descriptors, sets resource limits, then handles frames.

The server starts it as `python3 -I -B -X utf8 bootstrap.py SERVER_PID ADDRESS_SPACE FILE_SIZE OPEN_FILES HOME` with the protocol's
socket as descriptor 0, the shared memory as descriptor 1 and a pipe for stray output as descriptor 2.
"""

import faulthandler
import os
import signal
import sys


def take_descriptors():
    """Moves socket and memory to other descriptors, so that input and output of a mod cannot interfere with the protocol."""
    protocol, memory = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    try:
        inherited = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        inherited = list(range(3, 1024))
    for descriptor in inherited:
        if descriptor > 2 and descriptor not in (protocol, memory):
            try:
                os.close(descriptor)
            except OSError:
                pass
    return protocol, memory


def limit(address_space, file_size, open_files):
    """Disables core files, and limits memory, file size and descriptors."""
    try:
        import resource
    except ImportError:
        return
    limits = (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_AS", address_space),
        ("RLIMIT_FSIZE", file_size),
        ("RLIMIT_NOFILE", open_files),
    )
    for name, value in limits:
        if not hasattr(resource, name) or (name != "RLIMIT_CORE" and value <= 0):
            continue
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            pass  # macOS rejects some limits; in the sandbox they are already set


def die_with_server(server):
    """Makes the kernel kill this process when the server dies, even if a mod never returns."""
    if sys.platform.startswith("linux"):
        try:
            import ctypes

            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        except (ImportError, OSError, AttributeError):
            pass
    if os.getppid() != server:
        os._exit(0)


def main():
    server, address_space, file_size, open_files = (int(argument) for argument in sys.argv[1:5])
    worker_dir = sys.argv[5]
    protocol, memory = take_descriptors()
    # Before the server kills a worker that exceeded its deadline, it sends SIGUSR1 to get its stack.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False, chain=False)
    die_with_server(server)
    limit(address_space, file_size, open_files)
    sdk_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, sdk_folder)
    sys.argv = [""]
    from thunder_mods.worker import serve

    serve.main(protocol, memory, worker_dir, sdk_folder)


main()
