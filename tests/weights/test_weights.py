"""Whether the UI's weights are those of the checkpoint: told by content, whoever wrote to them and
however.
"""

import ctypes
import errno
import mmap
import os
import warnings
from itertools import pairwise

import comfy.model_management as mm
import comfy.sd
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.parallel_runtime import memory
from pipemesh.parallel_runtime.crossing.source import describe_source, state_source
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.memory import PAGE_BYTES, is_unwritten, mapped_files, pages_of
from pipemesh.parallel_runtime.weights import comparison, stored_weights
from pipemesh.parallel_runtime.weights.background_check import BackgroundCheck
from pipemesh.parallel_runtime.weights.checksum import checksum
from pipemesh.parallel_runtime.weights.comparison import WeightMark, Weights
from pipemesh.parallel_runtime.weights.slots import slots
from pipemesh.parallel_runtime.weights.stored_weights import DTYPES
from torch.utils._python_dispatch import TorchDispatchMode

from ..kit.models import load, write_model

NAME = "double_blocks.1.img_attn.qkv.weight"


def compared(patcher):
    weights = describe_source(patcher).weights
    weights.compare(patcher.model)
    return weights


def parameter(patcher):
    return patcher.model.diffusion_model.get_parameter(NAME)


def finds_a_write(patcher, place=0, weights=None):
    """Compares, which finds nothing, and again once a row was written, which finds that."""
    weights = weights or compared(patcher)
    assert not weights.changed
    with torch.inference_mode(parameter(patcher).is_inference()):
        parameter(patcher).data[place] += 1
    weights.compare(patcher.model)
    assert weights.changed == {NAME}


def contents(patcher):
    return {slot.name: slot.tensor.detach().clone() for slot in slots(patcher.model.diffusion_model)}


def in_inference_mode(module):
    with torch.inference_mode():
        module.weight.mul_(1.5)


def one_element_past_torch(module):
    module.weight.data[211, 33] += 0.5


def another_parameter(module):
    module.weight = torch.nn.Parameter(module.weight * 1.5, requires_grad=False)


def another_dtype(module):
    module.weight.data = module.weight.data.half()


def another_shape(module):
    module.weight.data = module.weight.data[:-1]


WAYS = [in_inference_mode, one_element_past_torch, another_parameter, another_dtype, another_shape]


@pytest.fixture(params=[False, True], ids=["", "loaded in inference mode, as a server does"])
def patcher(request, files):
    with torch.inference_mode(request.param):
        return load(files["model"])


@pytest.mark.parametrize("is_late", [False, True], ids=["before it was compared", "later"])
@pytest.mark.parametrize("change", WAYS, ids=lambda change: change.__name__)
def test_a_change_in_place_is_found_and_left_alone(patcher, change, is_late):
    weights = describe_source(patcher).weights
    if is_late:
        weights.compare(patcher.model)
    with torch.inference_mode(parameter(patcher).is_inference()):
        change(patcher.model.diffusion_model.get_submodule(NAME.removesuffix(".weight")))
    before = contents(patcher)
    weights.compare(patcher.model)
    if change is one_element_past_torch and is_late:
        with pytest.raises(Refused, match=f"to the weight {NAME} of model"):
            BackgroundCheck(weights, "model").require_unchanged(60.0)
        weights.compare(patcher.model)
    assert weights.changed == {NAME} and weights.changed_id
    assert list(weights.changed_tensors(patcher.model.diffusion_model)) == [f"diffusion_model.{NAME}"]
    assert all(torch.equal(value, before[name]) for name, value in contents(patcher).items())
    known = weights.changed_id
    weights.compare(patcher.model)
    assert weights.changed_id == known, "the ranks would be sent it again"


def test_a_further_change_has_another_name_and_an_undone_one_none(patcher):
    weights, before = compared(patcher), contents(patcher)[NAME]
    names = [weights.changed_id]
    for content in (before * 2, before * 3, before):
        parameter(patcher).data.copy_(content)
        weights.compare(patcher.model)
        names.append(weights.changed_id)
    assert names[0] == names[-1] == "" and len(set(names)) == 3
    assert not weights.changed


@pytest.fixture
def mapped(patcher, files):
    """A MODEL whose weights lie on a private mapping of the file, as ModelPatcherDynamic has it."""
    with torch.inference_mode(parameter(patcher).is_inference()):
        state = safetensors.torch.load_file(files["model"])
        for name, weight in patcher.model.diffusion_model.named_parameters():
            weight.data = state.get(name, weight.data)
    return patcher


@pytest.fixture
def read(monkeypatch):
    """Where the tensors lie of which a checksum is made."""
    seen = []
    monkeypatch.setattr(
        comparison, "checksum", lambda tensor, *_: seen.append(tensor.data_ptr()) or checksum(tensor)
    )
    return seen


def test_one_element_that_is_written_on_pages_of_a_file_that_comfyui_mapped_is_found(
    mapped, read, monkeypatch
):
    where, weights = parameter(mapped).data_ptr(), compared(mapped)
    assert BackgroundCheck(weights, "").require_unchanged(60.0)
    assert read and where not in read, "the kernel tells of its pages"
    assert parameter(mapped).data_ptr() == where and not weights.changed
    look_at, looked_at = comparison._looked_at, []
    monkeypatch.setattr(
        comparison, "_looked_at", lambda tensor: looked_at.append(tensor.data_ptr()) or look_at(tensor)
    )
    weights.compare(mapped.model)
    assert where not in looked_at, "the kernel tells at once of all pages whether they were written to"
    with torch.inference_mode(parameter(mapped).is_inference()):
        parameter(mapped).data[211, 34] += 0.5
    weights.compare(mapped.model)
    assert weights.changed == {NAME}


@pytest.mark.parametrize("name", ["file", b"caf\xe9", "two\u2028lines"], ids=ascii)
def test_pages_that_the_kernel_tells_of_are_those_of_files_that_nobody_else_can_write_to(tmp_path, name):
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    kinds = [(mmap.MAP_SHARED, mmap.PROT_WRITE), (mmap.MAP_PRIVATE, mmap.PROT_WRITE), (mmap.MAP_SHARED, 0)]
    with open(path, "a+b") as file:
        file.truncate(2 * PAGE_BYTES)
        maps = [mmap.mmap(file.fileno(), 0, kind, mmap.PROT_READ | prot) for kind, prot in kinds]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one cannot be written to
        weights = [torch.frombuffer(one, dtype=torch.uint8) for one in maps]
    mapped = mapped_files()
    marks = [WeightMark(one, mapped) for one in weights]
    assert [mark.pages is not None for mark in marks] == [False, True, True]
    assert WeightMark(weights[1].view(2, -1)[:, :9], mapped).pages is None, "its last bytes are further on"
    for written, mark in zip(weights[:2], marks, strict=False):
        assert mark.is_still(written)
        written.numpy()[PAGE_BYTES + 5] += 1
        assert not mark.is_still(written)
        again = WeightMark(written, mapped_files())
        assert again.is_still(written)
        written.numpy()[PAGE_BYTES + 7] += 1
        assert not again.is_still(written), "what was written to once is compared whole"


@pytest.mark.parametrize("kind", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["as a GGUF file", "private"])
def test_pages_of_a_file_are_not_read_while_ranks_compute(patcher, tmp_path, read, kind):
    """If the file is cut short, that would end ComfyUI; if it is overwritten, no node did it."""
    with torch.inference_mode(parameter(patcher).is_inference()):
        before = parameter(patcher).detach().clone()
    (tmp_path / "file").write_bytes(before.numpy().tobytes())
    with open(tmp_path / "file", "rb") as file, torch.inference_mode(before.is_inference()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it cannot be written to
            mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0, kind, mmap.PROT_READ), dtype=before.dtype)
        parameter(patcher).data = mapped.view(before.shape)
    weights = Weights()
    state_source(patcher, weights)
    weights.compare(patcher.model)
    read.clear()
    with open(tmp_path / "file", "r+b") as file:
        file.write(bytes(before.nbytes))
    assert BackgroundCheck(weights, "").require_unchanged(60.0)
    weights.compare(patcher.model)
    assert read and mapped.data_ptr() not in read and not weights.changed


def test_other_weights_at_the_address_of_those_that_are_gone_are_compared_anew(mapped):
    weights, gone = compared(mapped), parameter(mapped)
    mark = weights._seen[NAME]
    assert mark.is_still(gone)
    same = torch.asarray(gone.detach().view(torch.uint8).numpy(), copy=False).view(gone.dtype)
    assert same.data_ptr() == gone.data_ptr() and not mark.is_still(same)


def test_a_weight_in_other_memory_is_compared_whole_though_what_is_looked_at_is_the_same():
    """Of 2 rows and 3 columns (0, 1) is not looked at."""
    weight, other = torch.tensor([[0.0, 0, 0], [0, 0, 0]]), torch.tensor([[0.0, 1, 0], [0, 0, 0]])
    mark = WeightMark(weight)
    assert mark.is_still(weight) and not mark.is_still(other)


def in_another_dtype(folder, _):
    """As the loader cast them."""
    patcher = load(str(write_model(folder / "half.safetensors", dtype=torch.bfloat16)))
    assert parameter(patcher).dtype == torch.float32
    return patcher


def of_a_whole_checkpoint(folder, state):
    """Under names of the transformer's own."""
    state = {f"model.diffusion_model.{name}": tensor for name, tensor in state.items()}
    path = folder / "checkpoint.safetensors"
    safetensors.torch.save_file({**state, "vae.decoder.conv_in.bias": torch.zeros(8)}, path)
    return comfy.sd.load_checkpoint_guess_config(str(path), output_vae=False, output_clip=False)[0]


def of_a_file_that_cannot_be_mapped(folder, state):
    torch.save(state, folder / "model.pt")
    return load(str(folder / "model.pt"))


LOADED = [in_another_dtype, of_a_whole_checkpoint, of_a_file_that_cannot_be_mapped]


@pytest.mark.parametrize("loaded_so", LOADED, ids=lambda made: made.__name__)
def test_weights_are_compared_however_they_were_loaded(tmp_path, files, loaded_so):
    finds_a_write(loaded_so(tmp_path, safetensors.torch.load_file(files["model"])), -1)


def test_weights_that_comfyui_computes_from_those_of_the_file_are_compared(patcher, monkeypatch):
    """As it splits one of PixelDiT's into two."""
    config = patcher.model.model_config
    monkeypatch.setattr(config, "process_unet_state_dict", lambda state: {**state, NAME: state[NAME] * 1})
    finds_a_write(patcher)


def test_modules_under_other_names_are_not_mixed_up(patcher):
    """As a patch that swaps blocks leaves them, where nothing took it off before."""
    blocks = patcher.model.diffusion_model.double_blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]
    before = contents(patcher)
    weights = compared(patcher)
    assert NAME in weights.changed
    assert all(torch.equal(value, before[name]) for name, value in contents(patcher).items())


def test_what_was_sent_is_compared_by_checksum_wherever_it_lies_now(patcher):
    weights = Weights()
    weights.compare(patcher.model)
    assert not weights.changed, "there is nothing to compare with"
    state_source(patcher, weights)
    with torch.inference_mode(parameter(patcher).is_inference()):
        parameter(patcher).data = parameter(patcher).data.clone()
    weights.compare(patcher.model)
    finds_a_write(patcher, 200, weights)


def by_data(weight, place):
    weight.data[place] += 1


def by_numpy(weight, place):
    weight.detach().numpy()[place] += 1


def in_inference(weight, place):
    with torch.inference_mode():
        weight[place] += 1


@pytest.mark.parametrize(
    ("shape", "place"),
    [((3000, 40), 2001), ((40, 3000), (slice(None), 2001)), ((1500, 4, 3, 3), 1101), ((5000,), 4321)],
    ids=["a row", "a column", "a kernel", "an element of a vector"],
)
@pytest.mark.parametrize("write", [by_data, by_numpy, in_inference], ids=lambda write: write.__name__)
@pytest.mark.parametrize("is_inference", [False, True])
def test_a_write_to_a_weight_in_memory_of_its_own_is_found(write, shape, place, is_inference):
    with torch.inference_mode(is_inference):
        weight = torch.randn(shape)
    mark = WeightMark(weight)
    assert mark.is_still(weight)
    with torch.inference_mode(is_inference):
        write(weight, place)
    assert not mark.is_still(weight)


@given(st.lists(st.integers(1, 40), max_size=3))
def test_an_element_of_every_row_and_of_every_column_is_looked_at(shape):
    seen = torch.zeros(shape)
    seen.view(-1)[:: comparison._step(seen.shape)] = 1
    rows = seen.flatten(1) if len(shape) > 1 else seen.view(-1, 1)
    assert rows.any(0).all() and rows.any(1).all()


class CountedOps(TorchDispatchMode):
    """Counts what torch is asked to compute."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_weight_is_looked_at_in_few_operations_of_torch(patcher):
    weights, looked_at = compared(patcher), len(list(slots(patcher.model.diffusion_model)))
    for compare in (
        lambda: weights.compare(patcher.model),
        lambda: list(weights.changed_since(lambda: False)),
    ):
        with CountedOps() as ops:
            assert not compare()
        assert looked_at <= ops.count <= 7 * looked_at


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.complex128], ids=str)
def test_a_weight_of_any_dtype_is_looked_at(dtype):
    for shape in ((3, 5), (5,), (), (0, 4)):
        weight = torch.zeros(shape, dtype=torch.uint8).to(dtype)
        assert WeightMark(weight).is_still(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_a_checksum_sees_one_element_and_the_order_of_rows(dtype):
    tensor = torch.arange(5000 * 24).view(5000, 24).to(dtype)
    other = tensor.clone()
    assert checksum(tensor) == checksum(other)
    other[4321, 7] = 3
    assert checksum(tensor) != checksum(other)
    assert checksum(tensor) != checksum(tensor.flip(0))
    assert checksum(tensor) != checksum(tensor.view(24, 5000))


def test_a_checkpoint_overwritten_before_it_was_compared_is_refused(tmp_path):
    path = write_model(tmp_path / "model.safetensors", heads=1, blocks=(1, 1))
    patcher = load(str(path))
    weights = describe_source(patcher).weights
    write_model(path, heads=1, blocks=(2, 1))
    with pytest.raises(Refused, match="changed on disk since it was loaded"):
        weights.compare(patcher.model)


def test_a_change_is_found_when_the_checkpoint_is_gone(tmp_path):
    path = write_model(tmp_path / "model.safetensors")
    patcher = load(str(path))
    weights = compared(patcher)
    path.unlink()
    weights.compare(patcher.model)
    finds_a_write(patcher, 5, weights)


def test_a_cancel_amid_it_loses_nothing(patcher):
    weights, before = describe_source(patcher).weights, contents(patcher)
    parameter(patcher).data.mul_(1.5)
    mm.interrupt_current_processing()
    with pytest.raises(mm.InterruptProcessingException):
        weights.compare(patcher.model)
    weights.compare(patcher.model)
    assert weights.changed == {NAME}
    assert all(torch.equal(value, before[name]) for name, value in contents(patcher).items() if name != NAME)


@pytest.fixture(params=["untouched", "read", "first", "middle", "last", "shared", "no file"])
def pages(request, tmp_path):
    """A mapping of 64 pages, and whether one of them is this process's own by then."""
    nbytes, what = 64 * PAGE_BYTES, request.param
    (tmp_path / "file").write_bytes(bytes(nbytes))
    with open(tmp_path / "file", "r+b") as file:
        kind = mmap.MAP_SHARED if what == "shared" else mmap.MAP_PRIVATE
        mapping = mmap.mmap(-1 if what == "no file" else file.fileno(), nbytes, kind)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if what == "read":
            assert not any(mapping[place] for place in range(0, nbytes, PAGE_BYTES))
        written = {"first": 0, "middle": nbytes // 2, "last": nbytes - 1, "shared": 0, "no file": 0}
        if what in written:
            mapping[written[what]] = 1
        yield address, nbytes, what in ("first", "middle", "last", "no file")


def test_pages_that_were_written_to_are_found_with_the_kernels_own_search_and_without(pages, monkeypatch):
    address, nbytes, has_own = pages
    assert is_unwritten(address, nbytes) is not has_own

    def unknown(*_):
        raise OSError(errno.ENOTTY, "as before Linux 6.7")

    monkeypatch.setattr(memory, "has_own_page", unknown)
    assert is_unwritten(address, nbytes) is not has_own


def test_to_compare_an_unchanged_model_again_reads_nothing_that_grows_with_it(mapped, monkeypatch):
    weights, searches, read = compared(mapped), [], []
    monkeypatch.setattr(memory, "has_own_page", lambda *range_: searches.append(range_) is not None)
    monkeypatch.setattr(memory, "are_pages_of_files", lambda *range_: read.append(range_) is None)
    monkeypatch.setattr(stored_weights, "read_into", lambda *place: read.append(place))
    weights.compare(mapped.model)
    assert len(searches) == 1 and not read, "all pages of the file at once"


@given(st.lists(st.tuples(st.integers(0, 20 * PAGE_BYTES), st.integers(1, 3 * PAGE_BYTES)), max_size=8))
def test_pages_are_whole_each_once_and_in_as_few_spans(ranges):
    def pages_in(start, nbytes):
        return range(start // PAGE_BYTES, (start + nbytes - 1) // PAGE_BYTES + 1)

    spans = pages_of(ranges)
    assert all(number % PAGE_BYTES == 0 for span in spans for number in span)
    assert all(sum(one) < after[0] for one, after in pairwise(spans))
    assert [page for one in spans for page in pages_in(*one)] == sorted(
        {page for one in ranges for page in pages_in(*one)}
    )
