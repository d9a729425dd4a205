"""Ranks of a machine that load the same file read it once. Counted are its pages that they touch:
every rank has a mapping of its own.
"""

import re
from pathlib import Path

import msgspec
import pytest
import torch
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.comm.readers import readers_of
from pipemesh.parallel_runtime.comm.traffic import Stopped
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.weights.device_weights import DeviceWeights
from pipemesh.parallel_runtime.weights.sharded_weights import ShardedWeights
from pipemesh.parallel_runtime.wire.messages import Load, ReadWeights
from safetensors.torch import load_file, save_file

from ..client.test_client import Ledger, model_of
from ..client.test_client import load as load_by_name
from ..kit.late_device import late_device
from ..kit.late_ranks import LateWorld, own_gpu
from ..kit.models import load, run

LAYERS, WIDTH = 2, 2047  # no even parts
ONCE = 1.5  # of the file: the system may map 2 MiB for each end of a part; two ranks alone map 2


def touched(path, pid="self", kind="Rss"):
    """Bytes of the file's pages that a process has mapped, of all its mappings."""
    found, is_of = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of = line.endswith(str(path))
        elif is_of and line.startswith(f"{kind}:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.fixture
def file(tmp_path):
    """One for each test: what keeps the mappings of an earlier one does not count."""
    path, random = tmp_path / "model.safetensors", torch.Generator().manual_seed(1)
    layers = {
        f"{layer}.{name}": torch.randn(*shape, generator=random)
        for layer in range(LAYERS)
        for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
    }
    save_file(layers, path)
    return path


def on_pages(path, dtype):
    """A model on the file's pages, which computes in ``dtype``."""
    model = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, device="meta").requires_grad_(False) for _ in range(LAYERS))
    )
    model.load_state_dict(load_file(path), assign=True)
    for layer in model:
        layer.weight_comfy_model_dtype = layer.bias_comfy_model_dtype = dtype
    return model


def in_ranks(layout, work):
    with pytest.MonkeyPatch.context() as patch, late_device(seed=len(layout.product())) as box:
        LateWorld(layout, box, patch).run(work)


@pytest.mark.parametrize(
    ("ranks", "kept", "dtype"),
    [
        (2, "whole", torch.float32),
        (3, "whole", torch.bfloat16),
        (2, "sharded", torch.bfloat16),
        (3, "sharded", torch.float32),
    ],
    ids=str,
)
def test_ranks_that_hold_the_same_weights_read_their_file_once(file, ranks, kept, dtype):
    models, found, progress = [], {}, []

    @torch.inference_mode()
    def work(mesh, _run):
        model = on_pages(file, dtype)
        models.append(model)
        if kept == "sharded":
            mesh.sequence.share_weights(mesh.sequence.world.group)
            weights = ShardedWeights(model, own_gpu(), mesh.sequence.weights, lambda nbytes: None)
            loaded = [one.loaded for _, one in weights._sharded.values()]
            found[mesh.rank] = [
                layer.part.to("cpu")
                for layer in dict.fromkeys(layer for layer, _ in weights._sharded.values())
            ]
        else:
            weights = DeviceWeights(model, own_gpu(), lambda nbytes: None, readers=readers_of(mesh))
            loaded = list(weights._loaded.values())
            assert weights.unread_bytes == LAYERS * WIDTH * WIDTH * dtype.itemsize
            weights.read(progress.append)
            assert not weights.unread_bytes
            found[mesh.rank] = [one.to("cpu") for one in model.state_dict().values()]
        models.append(loaded)  # so that its mapping stays

    in_ranks(Layout(ulysses=ranks), work)
    assert touched(file) < ONCE * file.stat().st_size
    expected = [one.to(dtype) for one in load_file(file).values()]
    whole = [one.reshape(-1).view(torch.uint8) for one in expected if one.ndim == 2]
    if kept == "sharded":
        for parts, of_file in zip(
            zip(*(found[rank] for rank in range(ranks)), strict=True), whole, strict=True
        ):
            assert of_file[1 << 12 : 1 << 20].numpy().tobytes() in torch.cat(parts).numpy().tobytes()
    else:
        assert sum(progress) == ranks * LAYERS * WIDTH * WIDTH * dtype.itemsize
        names = list(load_file(file))
        for rank in range(ranks):
            by_name = dict(zip(on_pages(file, dtype).state_dict(), found[rank], strict=True))
            assert all(torch.equal(by_name[name], one) for name, one in zip(names, expected, strict=True))


def test_a_rank_that_cannot_read_its_part_leaves_with_all_others_and_the_next_load_is_right():
    came = {}

    def work(mesh, _run):
        readers, source = readers_of(mesh), torch.arange(300.0)
        for number in range(3):
            place = torch.empty(300, device=own_gpu())
            # The second time one rank has a source of another length
            broken = torch.zeros(7) if (mesh.rank, number) == (1, 1) else source
            try:
                readers.read(
                    [(place, broken), (torch.empty(300, device=own_gpu()), source)], lambda nbytes: None
                )
                came[mesh.rank, number] = place.to("cpu").equal(source)
            except (RuntimeError, Stopped) as error:
                came[mesh.rank, number] = type(error)

    in_ranks(Layout(ulysses=3), work)
    failed = {rank: came.pop((rank, 1)) for rank in range(3)}
    assert failed == {0: Stopped, 1: RuntimeError, 2: Stopped} and set(came.values()) == {True}


GROUPS = {
    Layout(): None,
    Layout(pipefusion=3): None,
    Layout(ulysses=2, ring=2): (0, 1, 2, 3),
    Layout(ulysses=2, cfg=2): (0, 1, 2, 3),
    Layout(ulysses=2, pipefusion=2): (2, 3),
    Layout(cfg=2, pipefusion=2): None,  # the ranks of one stage have no communicator
}


@pytest.mark.parametrize("layout", GROUPS, ids=Layout.equation)
def test_those_who_read_together_hold_the_same_blocks(layout, monkeypatch):
    with late_device(0) as box:
        world = LateWorld(layout, box, monkeypatch)
    mesh = world.meshes[-1]
    readers, members = readers_of(mesh), GROUPS[layout]
    assert (readers is None) == (members is None)
    if readers is not None:
        group = readers._group
        ranks = tuple(range(layout.world_size)) if group is None else world.members[world.name_of(group)]
        assert ranks == members and ranks[readers._rank] == mesh.rank and readers._size == len(ranks)
    mesh.sequence.device = torch.device("cpu")
    assert readers_of(mesh) is None


class Unread(Ledger):
    """A rank that builds a model and has its weights still to read."""

    fails = False

    def answer(self, request):
        if isinstance(request, ReadWeights) and self.fails:
            raise Refused("no")
        answer = super().answer(request)
        return msgspec.structs.replace(answer, unread=isinstance(request, Load))


def test_weights_are_read_once_every_rank_has_built_the_model_and_the_model_goes_where_they_cannot_be():
    pool = Unread(room=1)
    client = RemotePool(pool)
    load_by_name(client, "a")
    client.residency.release(model_of(client, "a"))
    pool.fails = True
    with pytest.raises(Refused):
        load_by_name(client, "a")
    asked = [kind for kind, _ in pool.asked]
    assert asked == ["Load", "ReadWeights", "Release"] * 2


def test_ranks_on_cpus_compute_on_the_pages_of_the_file_itself(files, clients):
    from pipemesh.parallel_runtime.client.remote_patcher import parallelize

    client, path = clients(2), files["model"]
    model = parallelize(load(path), client, holds_ui_device=False)
    run(model, steps=1)
    for pid in client.sessions.live.pool.ranks.pids:
        assert touched(path, pid) > 0.9 * Path(path).stat().st_size, "it computed with all of them"
        assert touched(path, pid, "Anonymous") == 0, "a copy of its own"
