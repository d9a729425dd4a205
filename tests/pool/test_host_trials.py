"""A class of ComfyUI's that no tested ComfyUI has is compared with stock before ranks compute it;
one that is known is not. Trees of ComfyUI with one file changed are found, and judged as they are.
"""

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from comfy.ldm.flux.model import Flux
from comfy.ldm.modules import attention
from comfy.ldm.wan.model import WanModel
from pipemesh.lab.commands.fingerprints import with_host
from pipemesh.lab.commands.parity import BOUND, relative_error, stock_model
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.nodes.status.collection import host_status
from pipemesh.nodes.status.figures import HostStatus
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.client.shared_evaluation import Admission
from pipemesh.parallel_runtime.errors import PoolFailed, Refused, RunCancelled
from pipemesh.parallel_runtime.watch.fingerprint import HostFiles
from pipemesh.parallel_runtime.wire.messages import TrialStep
from pipemesh.pool.devices import Device
from pipemesh.pool.pool import never
from pipemesh.pool.rank_setup import RankSetup
from pipemesh.pool.trial import comparisons, host_trials
from pipemesh.pool.trial.comparisons import request, samples_of, tried
from pipemesh.pool.trial.host_trials import FOLDER, HostTrials, TrialLost, Verdicts
from pipemesh.pool.trial.known_hosts import KnownHosts, known_hosts
from pipemesh.pool.trial.process import try_in_process

from ..fixtures import ALL, COMFYUI
from ..kit.host_trees import ATTENTION_FILE, FLUX_FILES, WAN_FILE, linked
from ..kit.models import load, run

ROOT = Path(__file__).resolve().parents[2]
NOTHING = KnownHosts((), {})
FLUX, WAN = "comfy.ldm.flux.model:Flux", "comfy.ldm.wan.model:WanModel"
SAME = (True, "9 comparisons")
STEP = TrialStep(text="flux as a sequence", done=1, total=4)


class Trial:
    """A trial that ends when it is told to, and counts how often it began."""

    def __init__(self):
        self.begun = 0
        self.ends = threading.Event()
        self.answer = SAME

    def __call__(self, kind, tell):
        self.begun += 1
        tell(STEP)
        self.ends.wait(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def trial():
    made = Trial()
    yield made
    made.ends.set()


@pytest.fixture
def trials(trial, tmp_path):
    """Makes the trials of a ComfyUI that starts."""

    def make(known=NOTHING, comfyui=COMFYUI, is_on=True, **options):
        try_class, kept = trial if is_on else None, Verdicts(tmp_path / FOLDER)
        return HostTrials(Path(comfyui), "9.9", try_class, kept, known=lambda: known, **options)

    return make


@pytest.mark.host
def test_a_class_of_a_tested_comfyui_is_computed_at_once_and_no_trial_begins(trial, trials, monkeypatch):
    monkeypatch.setattr("pipemesh.lab.commands.fingerprints.classes", lambda: [FLUX])
    made = trials(with_host(NOTHING, "9.9", Path(COMFYUI)))
    made.require(Flux)
    made.admit(Flux, never)
    assert trial.begun == 0 and made.pending() == () and made.verdicts() == ()


def test_auto_mode_has_one_gpu_until_the_verdict_and_a_pool_by_hand_waits_for_it(trial, trials):
    noticed, told = [], []
    made = trials(notice=noticed.append)
    with pytest.raises(Refused, match=r"Flux of this ComfyUI \(9.9\) is being compared with stock on the"):
        made.require(Flux)
    assert made.pending() == ("Flux",)
    with pytest.raises(RunCancelled):
        made.admit(Flux, lambda: True)

    def tell(now):
        told.append(now)
        if now.done:
            trial.ends.set()

    made.admit(Flux, never, tell)
    assert told[-1] == STEP, "it waited, and told for what"
    made.require(Flux)
    assert trial.begun == 1 and made.pending() == ()
    assert [(one.name, one.is_same) for one in made.verdicts()] == [("Flux", True)]
    (notice,) = noticed
    assert re.match(r"Flux of this ComfyUI \(9.9\) is not the one that PipeMesh was tested with: ", notice)


def test_the_status_names_what_was_tested_verified_here_refused_and_is_being_compared(trial, trials):
    made, tested = trials(), tuple(known_hosts().versions)
    assert host_status(made) == HostStatus("9.9", tested)
    for transformer, is_same in ((Flux, True), (WanModel, False)):
        trial.answer = is_same, "compared"
        trial.ends.clear()
        future = made.begin(transformer)
        assert host_status(made).pending == (transformer.__name__,)
        trial.ends.set()
        future.result(60)
    assert host_status(made) == HostStatus("9.9", tested, verified=("Flux",), refused=("WanModel",))


def test_a_class_that_ranks_compute_otherwise_is_refused_with_the_figure_after_a_restart_too(trial, trials):
    trial.answer = False, "flux, whole weights: off by 0.9, 2e-05 would be rounding"
    trial.ends.set()
    says = r"off by 0.9, .*; its code is \w{16}, PipeMesh's \w{16}\).* set PIPEMESH_TRIAL=0"
    for _ in range(2):
        with pytest.raises(Refused, match=says):
            trials().admit(Flux, never)
    assert trial.begun == 1


@pytest.mark.parametrize("changed", ["torch", "pack", "host", "the file is another"])
def test_a_verdict_holds_over_restarts_for_this_host_pack_and_torch_alone_and_the_log_says_what_is_void(
    trial, trials, monkeypatch, tmp_path, changed, caplog
):
    caplog.set_level("INFO")
    trial.ends.set()
    for _ in range(2):
        trials().admit(Flux, never)
    assert trial.begun == 1 and "void" not in caplog.text
    if changed == "torch":
        monkeypatch.setattr(host_trials.torch, "__version__", "99.0")
    elif changed == "pack":
        monkeypatch.setattr(host_trials, "pack_digest", lambda: "other")
    elif changed == "host":
        found = HostFiles(Path(COMFYUI)).fingerprint(FLUX)
        monkeypatch.setattr(type(found), "digest", "other")
    else:
        (kept,) = (tmp_path / FOLDER).iterdir()
        kept.write_bytes(kept.read_bytes().replace(b'"is_same"', b'"of_an_earlier_version\xff"'))
    (before,) = (tmp_path / FOLDER).iterdir()
    trials().admit(Flux, never)
    assert trial.begun == 2
    assert re.search(f"No saved verdict on Flux counts here: the 1 in {before.parent} ", caplog.text)


def test_a_trial_that_is_lost_is_told_and_tried_again(trial, trials):
    made, trial.answer = trials(), TrialLost("its process was killed (SIGKILL)")
    trial.ends.set()
    with pytest.raises(Refused, match=r"could not be compared with stock \(its process was killed"):
        made.admit(Flux, never)
    with pytest.raises(Refused, match="could not be compared"):
        made.require(Flux)
    assert trial.begun == 1, "auto mode does not try again and again"
    trial.answer = SAME
    made.admit(Flux, never)
    assert trial.begun == 2


def test_where_it_is_turned_off_every_class_is_computed(trial, trials):
    trials(is_on=False).admit(Flux, never)
    assert trial.begun == 0


def test_comfyui_files_that_cannot_be_read_are_told_and_no_class_of_them_is_computed(tmp_path, trials):
    file = tmp_path / FLUX_FILES[1]
    file.parent.mkdir(parents=True)
    file.write_text("class Flux:\n  def")
    cannot = r"flux/model.py cannot be read .*: repair the file, and restart ComfyUI"
    with pytest.raises(Refused, match=cannot):
        trials(comfyui=tmp_path).require(Flux)


def test_a_number_that_is_none_is_not_the_same():
    made = partial(comparisons.Compared, "flux, whole weights", allowed=2e-5)
    assert [made(error=one).is_same for one in (1e-5, 2e-5, 3e-5, float("nan"))] == [True, True, False, False]


@pytest.mark.parametrize("error", [OSError("no space left"), PoolFailed("rank 1 was killed"), MemoryError()])
def test_what_the_machine_is_to_blame_for_is_no_verdict_on_a_class(error):
    def fails(placement):
        raise error

    with pytest.raises(type(error)):
        tried(FLUX, SimpleNamespace(handle=fails))


@pytest.mark.parametrize(
    ("body", "limit_s", "says"),
    [("raise SystemExit(3)", 60, "status 3"), ("import time; time.sleep(60)", 0.2, "longer")],
)
def test_a_process_that_dies_or_takes_too_long_is_a_lost_trial(setup, tmp_path, body, limit_s, says):
    script = tmp_path / "script.py"
    script.write_text(body)
    with pytest.raises(TrialLost, match=says):
        try_in_process(setup, lambda: Device("cpu"), FLUX, print, (str(script),), limit_s)


# -- trees of ComfyUI with one file changed


CALL = (
    "x = block(x, e=e0, freqs=freqs, context=context, context_img_len=context_img_len, transformer_options="
)
LOOP = '        for i, block in enumerate(self.blocks):\n            transformer_options["block_index"] = i\n'
PATCHES = '        patches = transformer_options.get("patches", {})\n\n        if e.ndim < 4:'
PROJECTED = "x = torch.nn.functional.linear(x, block.self_attn.o.weight)"
IMPORT = "from comfy.ldm.modules.attention import optimized_attention\n"
FORWARD = "    def forward(self, x, timestep, context, clip_fea=None,"
HEAD = "        # head\n        x = self.head(x, e)\n"
# As ComfyUI's model compiler brackets what it records, where it manages the memory of a GPU
BRACKETS = """
import comfy.memory_management

def begin(device):
    assert not comfy.memory_management.aimdo_enabled, "what ranks allocate is recorded"

def end():
    pass

def bracketed(function):
    def inside(self, *given, **more):
        begin(None)
        made = function(self, *given, **more)
        end()
        return made
    return inside

"""
QKV = "            q.view(b, s, n * d),\n            k.view(b, s, n * d),\n            self.v(x).view(b, s, n * d),\n"
# As newer ComfyUIs hand over tensors that attention may free; an older one is given the class
WRAPPER = "def wrap_attn(func):\n    @functools.wraps(func)\n    def wrapper(*args, **kwargs):\n"
CLASS = """class AttentionTensorContainer:
    def __init__(self, tensor):
        self.take = lambda: tensor

"""
TAKEN = (
    "        args = tuple(one.take() if isinstance(one, AttentionTensorContainer) else one for one in args)\n"
)
CONTAINER = [(WAN_FILE, IMPORT, IMPORT.replace("import ", "import AttentionTensorContainer, "))]
if not hasattr(attention, "AttentionTensorContainer"):
    CONTAINER.append((ATTENTION_FILE, WRAPPER, CLASS + WRAPPER + TAKEN))
IN_STAGES = "a skipped block"  # wrong where a stage has it alone: ranks of a sequence skip it as stock does
HOST_MUTANTS = {  # how a newer ComfyUI may differ -> file, text, what stands instead, whether ranks can
    "a fused helper": (((WAN_FILE, LOOP, f"{LOOP}            {PROJECTED}\n"),), False),
    "an extra argument": (
        (
            (WAN_FILE, "context_img_len=257,\n        transformer_options={},", "context_img_len=257,\n        transformer_options={}, first=None,"),
            (WAN_FILE, PATCHES, f"        x = x if first is None else x + first\n{PATCHES}"),
            (WAN_FILE, LOOP, f"        first = x\n{LOOP}"),
            (WAN_FILE, CALL, CALL.replace("e=e0", "first=first, e=e0")),
        ),
        False,
    ),
    "a renamed argument": (
        (
            (WAN_FILE, "        freqs,\n", "        pe,\n"),
            (WAN_FILE, "            freqs, transformer_options=transformer_options)", "            pe, transformer_options=transformer_options)"),
            (WAN_FILE, CALL, CALL.replace("freqs=freqs", "pe=freqs")),
        ),
        False,
    ),
    "a row per token": (((WAN_FILE, LOOP, f"        e0 = e0[:, None].expand(-1, x.shape[1], -1, -1) if e0.ndim < 4 else e0\n{LOOP}"),), True),
    "a skipped block": (((WAN_FILE, LOOP, f"{LOOP}            if i == 1:\n                continue\n"),), False),
    "tokens that look at their neighbours": (((WAN_FILE, LOOP, f"{LOOP}            x = x + 0.1 * x.roll(1, 1)\n"),), False),
    "a container around q, k, v": ((*CONTAINER, (WAN_FILE, QKV, f"            *map(AttentionTensorContainer, ({QKV}            )),\n")), True),
    "brackets around forward, its loop and each block": (
        (
            (WAN_FILE, IMPORT, f"{IMPORT}{BRACKETS}"),
            (WAN_FILE, FORWARD, f"    @bracketed\n{FORWARD}"),
            (WAN_FILE, LOOP, f"        begin(x.device)\n{LOOP}"),
            (WAN_FILE, CALL, CALL.replace("block(x", "bracketed(block)(x")),
            (WAN_FILE, HEAD, f"        end()\n{HEAD}"),
        ),
        True,
    ),
    "a reordered return": (
        (
            (FLUX_FILES[0], "        return img, txt\n", "        return txt, img\n"),
            (FLUX_FILES[1], "                img, txt = block(img=img,", "                txt, img = block(img=img,"),
        ),
        True,
    ),
}  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    """Makes a tree of ComfyUI that is this one, but for some texts in its files."""

    def make(edits):
        root = tmp_path / "ComfyUI"
        linked(Path(COMFYUI), root, {file for file, _, _ in edits})
        for name, before, after in edits:
            text = (root / name).read_text()
            assert before in text, before
            (root / name).write_text(text.replace(before, after, 1))
        return root

    return make


def kind_of(edits):
    return WAN if edits[0][0] == WAN_FILE else FLUX


H3, NEXTDIT = "comfy/ldm/minimax/model.py", "comfy/ldm/lumina/model.py"
VIDEO, OMNI = "        video_x, audio_x = x[0], x[1]\n", "        omni = len(ref_latents) > 0\n"
USED_AGAIN = {  # with code of its own, that the forms known so far do not run
    "comfy.ldm.minimax.model:MiniMaxH3Model": (H3, VIDEO, f"        x = x if isinstance(x, list) else [x, x]\n{VIDEO}"),
    "comfy.ldm.lumina.model:NextDiT": (NEXTDIT, OMNI, f"        x = x + sum(kwargs.get('frames', ()))\n{OMNI}"),
}  # fmt: skip


@pytest.mark.host
@pytest.mark.parametrize(
    ("kind", "edits"),
    [(kind_of(edits), edits) for edits, _ in HOST_MUTANTS.values()]
    + [(kind, (edit,)) for kind, edit in USED_AGAIN.items()],
    ids=[*HOST_MUTANTS, *USED_AGAIN],
)
def test_a_fingerprint_finds_every_way_in_which_a_host_may_change(tree, kind, edits):
    found = HostFiles(tree(edits)).fingerprint(kind)
    assert not known_hosts().has(found)


@pytest.mark.host
@pytest.mark.parametrize("way", HOST_MUTANTS if ALL else ["tokens that look at their neighbours"])
def test_the_trial_judges_another_comfyui_by_what_ranks_compute_of_it(tree, way):
    edits, is_same = HOST_MUTANTS[way]
    setup, told = RankSetup(comfyui=str(tree(edits))), []
    found, says = try_in_process(setup, partial(Device, "cpu"), kind_of(edits), told.append)
    assert found == is_same, says
    assert told or not is_same


@pytest.mark.host
@pytest.mark.skipif(not ALL, reason="a minute for each ComfyUI")
@pytest.mark.parametrize("way", HOST_MUTANTS)
def test_a_full_comparison_with_stock_says_of_another_comfyui_what_the_trial_says(tree, way):
    """All pairs of ranks, tokens, heads, cfg, masks, samplers; weights are whole and shared out."""
    edits, is_same = HOST_MUTANTS[way]
    host = replace(ComfyInstall.from_json(os.environ["PIPEMESH_HOST"]), comfyui=str(tree(edits)))
    env, found = {**os.environ, "PIPEMESH_HOST": host.to_json()}, {}
    asked = ("--cover", "--family", samples_of(kind_of(edits))[0].name, "--weights")
    for weights in ("whole", "sharded"):
        command = [sys.executable, "-m", "lab", "parity", *asked, weights]
        ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        said = f"{ran.stdout[-500:]}{ran.stderr[-2000:]}"
        assert not ran.returncode or re.search("^BAD |^pipemesh: ", said, re.MULTILINE), said
        found[weights] = ran.returncode == 0
    assert all(found.values()) == (is_same or way == IN_STAGES), found


@pytest.mark.host
def test_this_comfyui_stands_the_trial_in_every_way_to_keep_weights_and_in_stages(clients, monkeypatch):
    def pool_of(keeper, layout):
        return clients(ulysses=layout.ulysses, pipefusion=layout.pipefusion)

    monkeypatch.setattr(comparisons, "pool_with", pool_of)
    samples, told = samples_of(FLUX)[: None if ALL else 1], []
    monkeypatch.setattr(comparisons, "samples_of", lambda kind: samples)
    said = tried(FLUX, None, told.append)
    assert said.is_same and len(told) == 2 * len(samples), said
    assert said.says.startswith(f"{2 * len(told)} comparisons"), "whole, shared-out, int8, two stages"


def test_a_form_that_comfyui_itself_fails_at_is_no_verdict_on_its_class():
    broken = replace(samples_of(FLUX)[-1], prompt_extras=lambda latent: {"reference_latents": [latent[0, 0]]})
    with pytest.raises(ValueError, match="unpack"):
        request(broken, stock_model(5, family=broken.name))
    assert [*comparisons.as_sequence(broken, None), *comparisons.as_pipeline(broken, None)] == []


def model_of(home, config_home, config="NewForm"):
    """A model of types of these modules."""
    made = type("NewForm", (), {"__module__": home})()
    made.model_config = type(config, (), {"__module__": config_home})()
    return made


def test_a_new_form_of_a_class_is_refused_though_its_old_forms_are_computed_as_by_stock(
    trial, trials, monkeypatch
):
    """The comparison has the forms of the samples alone. A pack's type is no form."""
    monkeypatch.setattr("pipemesh.lab.commands.fingerprints.classes", lambda: [FLUX])
    trial.ends.set()
    made = trials(replace(NOTHING, types=known_hosts().types))
    sample, of_pack = model_of("comfy.model_base", "comfy.supported_models", "Flux2"), model_of("a", "a")
    for old in (stock_model(5).model, of_pack, sample):
        made.admit(Flux, never, model=old)
        made.require(Flux, old)
    new_base, new_config = model_of("comfy.model_base", "a"), model_of("a", "comfy.supported_models")
    for new in (new_base, new_config):
        for asked in (partial(made.require, Flux, new), partial(made.admit, Flux, never, model=new)):
            with pytest.raises(Refused, match=r"^NewForm of this ComfyUI \(9.9\) is a new form of Flux, and"):
                asked()
    trials(with_host(NOTHING, "9.9", Path(COMFYUI))).admit(Flux, never, model=new_base)


def test_a_pool_by_hand_is_asked_before_ranks_load_a_model(clients, files, trial, trials, monkeypatch):
    model, client = load(files["model"]), clients(2)
    truth, made = run(model), trials(replace(NOTHING, types=known_hosts().types))
    trial.answer = False, "off by 0.9"
    trial.ends.set()
    loads = client.sessions.open(never).loads
    ours = parallelize(model, client, 0.0)
    with monkeypatch.context() as patch:
        asks = Admission(lambda one: made.admit(type(one.diffusion_model), never, model=one))
        patch.setattr(ours.remote.pool, "admission", asks)
        with pytest.raises(Refused, match=r"off by 0\.9"):
            run(ours)
        assert client.sessions.live.loads == loads
    assert relative_error(run(ours), truth) <= BOUND
