"""A late GPU shows what a real one need not: what is read too early, written too early, freed too
early or not waited for.
"""

import pytest
import torch
from pipemesh.parallel_runtime.comm.device_copies import LateValue, Reached, to_cpu, to_device

from ..kit.late_device import late_device
from ..kit.late_queues import DEVICE, Op, Stuck


def test_what_is_not_waited_for_is_not_there():
    with late_device() as box:
        numbers = to_device(torch.arange(3.0), DEVICE)
        place, reached = to_cpu(numbers * 2), Reached(DEVICE)
        assert place.isnan().all() and not box.gpu.waits
        reached.wait()
        assert place.tolist() == [0, 2, 4] and box.gpu.waits == {"Event.synchronize": 1}
        late = LateValue(numbers.sum())
        assert late.read() == 3


def test_what_lies_in_pinned_memory_is_read_when_the_gpu_comes_to_it():
    with late_device():
        staged = torch.empty(3, pin_memory=True)
        moved = staged.copy_(torch.arange(3.0)).to(DEVICE, non_blocking=True)
        staged.fill_(7)
        assert moved.tolist() == [7, 7, 7]


def test_memory_that_is_not_pinned_is_waited_for():
    with late_device() as box:
        pageable = torch.arange(3.0)
        moved = pageable.to(DEVICE, non_blocking=True)
        pageable.fill_(7)
        assert moved.tolist() == [0, 1, 2] and box.gpu.waits["copy"] == 2


def test_memory_that_is_free_is_written_behind_what_its_stream_was_asked_for_before():
    with late_device():
        freed = torch.ones(3, device=DEVICE)
        content, read = freed.content, freed + 1
        del freed
        assert read.tolist() == [2, 2, 2]
        assert content.isnan().all(), "another stream that reads it has no right to it"


def test_a_wait_for_what_never_comes_is_an_error():
    with late_device() as box, pytest.raises(Stuck):
        box.gpu.wait_for(box.queue().push(needs=(Op(),)), "nothing")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:2"])
def test_a_process_that_asks_for_another_gpu_or_for_none_by_number_is_told(device):
    with late_device() as box:
        box.own.device = torch.device("cuda", 1)
        for ask in (lambda: torch.ones(2, device=device), lambda: torch.ones(2).to(device)):
            with pytest.raises(RuntimeError, match=f"{device} in a process that computes on cuda:1"):
                ask()
        assert torch.ones(2, device="cuda:1").device == box.own.device
