"""The command that trains the demo's model: how it is interrupted, where its files go, and what it
refuses.
"""

import shutil
import signal
from types import SimpleNamespace

import pytest
from pipemesh.lab.commands import train
from pipemesh.lab.pictures import picture_set
from pipemesh.lab.pictures.autoencoder import encoder_weights
from pipemesh.lab.pictures.files import ASSETS, LARGER_MODEL, MODEL, VAE
from pipemesh.lab.pictures.network import Width
from pipemesh.lab.pictures.training import CHECKPOINT, Training
from pipemesh.launcher.errors import LaunchError
from safetensors.torch import load_file

FEW = ("--pictures", "8", "--side", "64", "--decoder-iterations", "1", "--fp32", "--threads", "2")
TRAINED = ("loss.png", MODEL, VAE)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The command with a small network and its files in a folder of the test."""
    monkeypatch.setattr(train, "Width", lambda: Width(hidden=128, double_blocks=1, single_blocks=1))
    monkeypatch.setattr(train, "draw_samples", lambda training, folder: None)
    return lambda *options: train.main(["--folder", str(tmp_path), *FEW, *options], None)


@pytest.fixture(autouse=True)
def signals_as_before():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def times_of(folder):
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


@pytest.mark.cover(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_training_that_is_interrupted_is_saved_writes_no_model_and_goes_on(
    trained, tmp_path, monkeypatch, capsys, number
):
    steps, step = [], train.Training.step

    def interrupted(training):
        steps.append(step(training))
        if len(steps) == 3:
            signal.raise_signal(number)
        return steps[-1]

    monkeypatch.setattr(train.Training, "step", interrupted)
    before = times_of(ASSETS)
    assert trained("--iterations", "4") == 0
    assert len(steps) == 3 and (tmp_path / CHECKPOINT).exists() and not (tmp_path / train.TRAINED).exists()
    assert "Stopped at iteration 2 of 4: the same command goes on from there." in capsys.readouterr().out
    assert trained("--iterations", "4") == 0
    assert len(steps) == 5 and names(tmp_path / train.TRAINED) == sorted(TRAINED)
    assert "The demo draws with the files in" in capsys.readouterr().out
    assert times_of(ASSETS) == before, "the demo's own files are replaced by request only"
    assert trained("--iterations", "9", "--only-export", "--export", str(tmp_path / "named")) == 0
    assert names(tmp_path / "named") == sorted(TRAINED) and len(steps) == 5


def test_the_larger_model_begins_with_the_small_ones_weights_and_its_pictures_latents(
    trained, tmp_path, monkeypatch
):
    trainings = []
    monkeypatch.setattr(train, "Width", Width)
    monkeypatch.setattr(train, "Training", lambda *given: trainings.append(Training(*given)) or trainings[0])
    monkeypatch.setattr(Training, "step", lambda training: pytest.fail("it is read before a step"))
    monkeypatch.setattr(train, "stop_at", lambda until: lambda: True)
    assert trained("--larger", "--iterations", "4") == 0
    (training,) = trainings
    for name, weight in load_file(ASSETS / MODEL).items():
        assert training.transformer.averaged_weights()[name].equal(weight.float()), name
    encoder = encoder_weights(training.projection)["taesd_encoder.10.weight"]
    assert encoder.equal(load_file(ASSETS / VAE)["taesd_encoder.10.weight"].float())
    assert trained("--larger", "--iterations", "4", "--only-export") == 0
    assert names(tmp_path / train.TRAINED) == [LARGER_MODEL]


def test_a_second_interrupt_ends_it_at_once():
    is_asked = train.stop_at(None)
    signal.raise_signal(signal.SIGINT)
    assert is_asked()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_disk_without_room_is_named_before_anything_is_drawn(trained, tmp_path, monkeypatch):
    free = [3 * 10**8, 10**9]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free.pop(0)))
    says = r" has 0\.3 GB free and training takes 1\.1: make room, or choose --folder\.$"
    with pytest.raises(LaunchError, match=says):
        trained("--pictures", "16384", "--side", "128")
    assert names(tmp_path) == []
    monkeypatch.setattr(picture_set, "draw", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trained()
    assert names(tmp_path) == [], "a set that is half drawn takes no room"


def test_a_checkpoint_of_another_model_and_none_at_all_are_named(trained, tmp_path):
    with pytest.raises(LaunchError, match="train first, without --only-export"):
        trained("--only-export")
    (tmp_path / CHECKPOINT).write_bytes(b"half")
    says = r"is no checkpoint of this model \(.*\): remove it to begin anew\.$"
    with pytest.raises(LaunchError, match=says):
        trained()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--side 120", "--side 120: choose a multiple of 16, 64 or more"),
        ("--side 48", "--side 48: choose a multiple of 16, 64 or more"),
        ("--iterations 0", "--iterations 0: choose 1 or more"),
        ("--threads 0", "--threads 0: choose 1 or more"),
        ("--minutes 0", "--minutes 0: choose more than 0"),
        ("--minutes nan", "--minutes nan: choose more than 0"),
        ("--until 25:10", "25:10 is no time of the day: say, for example, 23:30"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_named(capsys, options, says):
    with pytest.raises(SystemExit):
        train.parse(options.split())
    assert says in capsys.readouterr().err
