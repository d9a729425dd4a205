"""The queues of late GPUs (late_device.py), and what moves them on."""

from collections import Counter, deque
from random import Random

import torch
from greenlet import getcurrent

DEVICE = torch.device("cuda", 0)
LOOKS = 32  # at how far a GPU is, until it has gone on


class Stuck(AssertionError):
    """Somebody waits for what no queue comes to."""


class Op:
    """An operation in a queue. It begins when what it ``needs`` is over, and is over when its
    ``meetings`` are. ``holds``: memory that is in use until then.
    """

    def __init__(self, run=lambda: None, needs=(), meetings=(), holds=()):
        self.run, self.needs, self.meetings, self.holds = run, needs, meetings, holds
        self.has_begun = self.is_over = False
        self.ended_at = 0


class Queue:
    """A stream. ``last``: what was put into it last; ``speed``: how often it moves."""

    def __init__(self, speed):
        self.speed = speed
        self.ops = deque()
        self.recording = None  # what is asked for while a graph is recorded; it is not done
        self.has_failed = False  # a driver's call in that: then the recording is void
        self.last = Op()
        self.last.is_over = True

    def push(self, *args, **kwargs):
        self.last = Op(*args, **kwargs)
        self.ops.append(self.last)
        return self.last

    def do_behind(self, run):
        """What nobody asked for, nor waits for."""
        self.ops.append(Op(run))

    @property
    def can_move(self):
        if not self.ops:
            return False
        head = self.ops[0]
        return all(one.is_over for one in (head.meetings if head.has_begun else head.needs))

    def move(self, now):
        head = self.ops[0]
        if not head.has_begun:
            head.has_begun = True
            head.run()
        if all(meeting.is_over for meeting in head.meetings):
            self.ops.popleft()
            head.is_over, head.ended_at = True, now
            head.run = head.needs = head.meetings = head.holds = None


class Gpu:
    """One process's GPU. ``current``: the stream that the process computes in. ``launches``: how
    often it asked for what; ``waits``: how often it waited for what, ``idle`` how often of these
    nothing was left to compute then. ``held_bytes`` of all tensors that somebody has. ``places``:
    how many more of them there is memory for, None for any number.
    """

    def __init__(self, box, device=DEVICE):
        self.box, self.device = box, device
        self.current = box.queue()
        self._of_group = {}
        self.launches, self.waits, self.idle = Counter(), Counter(), Counter()
        self.recordings = self.replays = self.held_bytes = self.graph_bytes = 0
        self.generator = None  # what torch keeps there for graphs that draw
        self.places = None

    def stream_of(self, group):
        if group not in self._of_group:
            self._of_group[group] = self.box.queue()
        return self._of_group[group]

    def push(self, what, *args, **kwargs):
        if self.current.recording is not None:
            self.current.recording.append(lambda: self.push(what, *args, **kwargs))
            return Op()
        self.launches[what] += 1
        op = self.current.push(*args, **kwargs)
        self.box.pass_time()
        return op

    def wait_for(self, op, why):
        """Has the process wait until an operation is over."""
        self.require_no_recording(why)
        self.waits[why] += 1
        self.idle[why] += op is self.current.last
        self.box.wait_for(op)

    def require_no_recording(self, what):
        """A driver fails then."""
        if self.current.recording is not None:
            self.current.has_failed = True
            raise RuntimeError(f"{what} while a graph is recorded")

    def free(self, queue, run):
        """``queue``: that the memory was taken in; None if a graph was recorded there."""
        if self.current.recording is not None:
            self.current.recording.append(lambda: self.current.do_behind(run))
        else:
            (queue or self.current).do_behind(run)

    def take(self, nbytes):
        if self.places is not None:
            if not self.places:
                raise torch.OutOfMemoryError("no memory is left")
            self.places -= 1
        self.held_bytes += nbytes

    def join(self, op):
        """Has the current stream wait for it; the process does not."""
        self.current.push(needs=(op,))


class Scheduler:
    """What moves on, and when: with seed 0 nothing before somebody waits for it, with 1 all that
    can; with others as it comes. ``at_once``: an operation is over before the next is asked for.
    ``joins``: whether NCCL's collectives that block have a stream of their own, to which the
    caller's is joined, as in torch 2.7; else they are in the caller's.
    """

    EAGER = (0.0, 1.0, 0.1, 0.5)

    def __init__(self, seed, at_once=False):
        self.random = Random(seed)
        self.at_once = at_once
        self.eagerness = self.EAGER[seed % len(self.EAGER)]
        self.joins = seed % 4 > 1

    def speed(self):
        return self.random.choice((1, 8, 64))

    def goes_on(self):
        return self.random.random() < self.eagerness


class Box:
    """The GPUs of all processes. ``give_way(op)``: lets others go on: where an operation is given,
    until a queue can move. ``own``: of whoever is no other process; ``done``: operations, so far.
    """

    def __init__(self, seed=0, at_once=False):
        self.scheduler = Scheduler(seed, at_once)
        self.queues = []
        self.pinned = set()  # memory of the CPU
        self.registered = {}  # likewise: where it starts, and its bytes
        self.registers = True
        self.give_way = None
        self.done = self._looks = 0
        self.own = Gpu(self)

    def queue(self):
        self.queues.append(Queue(self.scheduler.speed()))
        return self.queues[-1]

    @property
    def gpu(self):
        """That of the process at hand: its greenlet, or one that it has come from, has it."""
        process = getcurrent()
        while process is not None and not hasattr(process, "gpu"):
            process = process.parent
        return self.own if process is None else process.gpu

    def can_move(self):
        return any(queue.can_move for queue in self.queues)

    def move(self):
        """Moves a queue on by a few operations. False where none can."""
        moving = [queue for queue in self.queues if queue.can_move]
        if not moving:
            return False
        random = self.scheduler.random
        queue = random.choices(moving, [queue.speed for queue in moving])[0]
        with torch._C._DisableTorchDispatch():
            for _ in range(random.randint(1, 6)):
                if queue.can_move:
                    self.done += 1
                    queue.move(self.done)
        return True

    def pass_time(self):
        """An operation was asked for: some may be done meanwhile."""
        while (self.scheduler.at_once or self.scheduler.goes_on()) and self.move():
            pass

    def look(self):
        """A process looks how far its GPU is."""
        self._looks += 1
        is_time = self.scheduler.goes_on() or self._looks % LOOKS == 0
        if is_time and not self.move() and self.give_way is not None:
            self.give_way(None)

    def wait_for(self, op):
        while not op.is_over:
            if not self.move():
                if self.give_way is None:
                    raise Stuck("no queue can move")
                self.give_way(op)

    def finish(self):
        """Does all that is left."""
        while self.move():
            pass
        if left := [len(queue.ops) for queue in self.queues if queue.ops]:
            raise Stuck(f"{left} operations are left in queues")
