"""Whole prompts of stock graphs in auto mode, from the text to the picture: what pools sample,
ComfyUI decodes, encodes, takes in tiles and upscales. These are too small for it to go to the pool
too; `python3 -m lab bench prompts` times larger ones, in which it does.
"""

import pytest
from pipemesh.lab.bench import prompts

from ..fixtures import ALL
from .test_end_to_end_auto import runs

SIDE, WIDTH = 128, 32
CASES = prompts.CASES if ALL else prompts.COVER


@pytest.fixture(scope="module", autouse=True)
def prompt_files(server):
    prompts.write_models(server.models, WIDTH)


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_in_auto_mode_gives_the_picture_of_comfyui_alone(server, case):
    before = runs(server)
    try:
        _, apart = prompts.Prompts(server, prompts.CASES[case](SIDE)).round(3)
    finally:
        server.post(prompts.SETTING, False)
    assert apart <= 1
    assert runs(server) > before, "it was sampled by ComfyUI alone"
