"""Runs of several ranks: one of them is killed at any instant, or the network between them is cut; all end, and the run can go on."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from workplace import kill, training

# Seconds that ranks wait for a sign of life, and those that they may take beyond that.
TIMEOUT, LATE = 5, 10

# A step of six micro-batches, which two and three ranks share; the last of an epoch has two.
SETS = ["train.micro_batch_size=1", "train.gradient_accumulation_steps=6"]


class Ranks:
    """The processes of a run, by rank, and the launcher where there is one."""

    def __init__(self, place, size, arguments, by_launch=False, failpoints=None):
        self.place, self.size, self.launcher = place, size, None
        arguments = [*arguments, "--dist-timeout", f"{TIMEOUT}s"]
        if by_launch:
            self.launcher = place.start(["launch", "--nproc", size, "--", *arguments])
            self.children = [self.launcher]
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.children = []
        for rank in range(size):
            more = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            more["KVTUNE_FAILPOINT"] = (failpoints or {}).get(rank, "")
            self.children.append(place.start(arguments, {name: str(value) for name, value in more.items() if value != ""}))

    def send(self, rank, number):
        """Sends a signal to a rank; whether there was one."""
        if not self.launcher:
            kill(self.children[rank], number)
            return self.children[rank].poll() is None or number == signal.SIGKILL
        children = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children")
        try:
            # In the order in which they were started; while some are missing nobody is killed.
            pids = [int(pid) for pid in children.read_text().split()]
            if len(pids) == self.size:
                os.kill(pids[rank], number)
                return True
        except OSError:
            pass
        return False

    def ended(self):
        """How all have ended, and how long the last one took from now on; who takes too long is killed."""
        began = time.monotonic()
        ended = [self.place.ended(child, TIMEOUT + 3 * LATE) for child in self.children]
        return ended, time.monotonic() - began


def finished(place, run, size, arguments=None):
    """A run of so many ranks to its end, or what is wrong."""
    ended, _ = Ranks(place, size, arguments or training(run, SETS)).ended()
    return next((fault for fault in (one.fault([0]) for one in ended) if fault), None)


def left_running(run):
    """Processes that have the name of a run among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if run.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            pass
    return found


def fault_of_end(ranks, victim, ended, took):
    """What is wrong with how the ranks ended of which one was killed."""
    if took > TIMEOUT + LATE:
        return f"{took:.1f} s to end"
    if ranks.launcher:
        words = ended[0].words
        if ended[0].code == 0 or f"rank {victim} was the first to fail, with signal 9" in words:
            return None if "panicked" not in words and "has a defect" not in words else words[-400:]
        return f"the launcher ended with {ended[0].code}: {words[-400:]}"
    if ended[victim].code != -signal.SIGKILL:
        return ended[victim].fault([0])
    for rank, one in enumerate(ended):
        fault = None if rank == victim else one.fault([0, 1])
        # Where it was killed before they met it has told nobody its host.
        named = rf"rank {victim} on `|missing (rank {victim}$|ranks .*\b{victim}\b)|TCPStore"
        if not fault and rank != victim and one.code == 1 and not re.search(named, one.words, re.M):
            fault = f"rank {victim} was killed, and is not named: {one.words[-400:]}"
        if fault:
            return f"rank {rank} of {ranks.size}: {fault}"
    return None


def compared(place, run, whole, is_same_size):
    """What a run left otherwise than the whole one: to the bit where as many ranks have ended it, else what does not depend on rounding."""
    if is_same_size:
        return place.difference(run, whole)
    exact = ["step", "epoch", "learning_rate", "tokens", "targets", "total_tokens"]
    found, expected = ([{key: line.get(key) for key in exact} for line in left["metrics"]] for left in (place.left(run), whole))
    return None if found == expected else f"{run}: steps differ"


def killed(place, tally, count, pool):
    """kill -9 of a random rank: at a random instant, in an operation on files, or while it waits in an exchange for another one."""
    whole, length = {}, {}
    for size in (2, 3):
        began = time.monotonic()
        fault = finished(place, f"whole-{size}", size)
        if fault:
            return tally.failed(f"a run of {size} ranks", fault)
        whole[size], length[size] = place.left(f"whole-{size}"), time.monotonic() - began

    def one(number):
        run, drawn = f"ranks-{number}", random.Random(number)
        size, way = drawn.choice([2, 3]), ["at an instant", "in files", "in an exchange"][number % 3]
        victim = 0 if way == "in files" else drawn.randrange(size)
        failpoints = {0: f"any=kill:{drawn.randint(1, 500)}"} if way == "in files" else None
        ranks = Ranks(place, size, training(run, SETS), way != "in files" and number % 2 == 0, failpoints)
        if way != "in files":
            time.sleep(drawn.uniform(0, length[size]))
            other = (victim + 1) % size
            if way == "in an exchange" and ranks.send(other, signal.SIGSTOP):
                time.sleep(0.5)
            ranks.send(victim, signal.SIGKILL)
            ranks.send(other, signal.SIGCONT)
        else:
            # It ends by itself, soon or in good order.
            ranks.children[0].wait(300)
        ended, took = ranks.ended()
        fault = fault_of_end(ranks, victim, ended, took)
        if left_running(run):
            fault = fault or f"processes {left_running(run)} are left"
        struck = any(one.code != 0 for one in ended)
        if (place.path(run) / "recipe.resolved.toml").exists():
            words = place.output(["inspect", run])
            if "damaged" in words or "not whole" in words:
                fault = fault or f"a checkpoint is not whole: {words[-300:]}"
            again = ["resume", run]
        else:
            shutil.rmtree(place.path(run), ignore_errors=True)
            again = training(run, SETS)
        after = size if number % 4 else drawn.choice([1, 2, 3])
        fault = fault or finished(place, run, after, again) or compared(place, run, whole[size], after == size)
        place.remove(run)
        return f"{run}, {way}, rank {victim} of {size}: {fault}" if fault else None, struck, took

    outcomes = list(pool.map(one, range(count)))
    struck, longest = sum(struck for _, struck, _ in outcomes), max(took for _, _, took in outcomes)
    name = f"kill -9 of a rank ({struck} before the end of the run), the last other ends within {longest:.1f} s, resumed to the bit"
    tally.of(name, [fault for fault, _, _ in outcomes])


def cut_off(place, tally, count):
    """Two ranks in network namespaces of their own: the link between them goes down in the middle of a run."""
    names = [f"kvtune-{os.getpid()}-{rank}" for rank in range(2)]

    def ip(*arguments):
        return subprocess.run(["ip", *arguments], capture_output=True, text=True)

    try:
        if any(ip("netns", "add", name).returncode for name in names):
            print("          network: skipped, for no network namespace can be made here")
            return
        ip("link", "add", "kvtune0", "netns", names[0], "type", "veth", "peer", "name", "kvtune0", "netns", names[1])
        for rank, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.87.0.{rank + 1}/24", "dev", "kvtune0")
            for link in ("lo", "kvtune0"):
                ip("-n", name, "link", "set", link, "up")
        tally.of("the link between two ranks is cut: each names the other and its host", [cut_once(place, names, ip, number) for number in range(count)])
    except FileNotFoundError:
        print("          network: skipped, for there is no program `ip`")
    finally:
        for name in names:
            ip("netns", "del", name)


def cut_once(place, names, ip, number):
    ip("-n", names[1], "link", "set", "kvtune0", "up")
    run, children = f"cut-{number}", []
    arguments = [*training(run, [*SETS, "train.epochs=100000", "train.max_steps=100000"]), "--dist-timeout", f"{TIMEOUT}s"]
    for rank, name in enumerate(names):
        more = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "10.87.0.1", "MASTER_PORT": 29500 + number}
        host = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname host-{rank}; exec "$0" "$@"']
        children.append(place.start(arguments, {key: str(value) for key, value in more.items()}, host))
    metrics = place.path(run) / "metrics.jsonl"
    waited = time.monotonic()
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3 + number):
        if time.monotonic() - waited > 120 or any(child.poll() is not None for child in children):
            [kill(child) for child in children]
            return f"they did not meet: {[place.ended(child).words[-300:] for child in children]}"
        time.sleep(0.05)
    ip("-n", names[1], "link", "set", "kvtune0", "down")
    cut = time.monotonic()
    ended = [place.ended(child, TIMEOUT + 3 * LATE) for child in children]
    took = time.monotonic() - cut
    for rank, one in enumerate(ended):
        other = f"rank {1 - rank} on `host-{1 - rank}` is lost"
        fault = one.fault([1]) or (None if other in one.words else f"without `{other}`: {one.words[-400:]}")
        if fault:
            return f"rank {rank}: {fault}"
    words = place.output(["inspect", run])
    if "damaged" in words or "not whole" in words:
        return f"a checkpoint is not whole: {words[-300:]}"
    print(f"          both ended {took:.1f} s after the cut, with a time-out of {TIMEOUT} s", flush=True)
    place.remove(run)
    return f"{took:.1f} s to end" if took > TIMEOUT + LATE else None
