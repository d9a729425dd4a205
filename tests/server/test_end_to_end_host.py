"""A server whose ComfyUI has changed a model since it was tested: auto mode samples on one GPU
while the model is compared with stock; the images are stock's, and the next ones are the pool's.
"""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from pipemesh.lab.commands.parity import BOUND, relative_error

from ..fixtures import ALL, COMFYUI
from ..kit.host_trees import FLUX_FILES, linked
from ..kit.served import graph, latent, start
from .test_end_to_end_auto import runs, switch

BRACKET = (
    "                img, txt = block(img=img,",
    "                img, txt = (lambda **all: block(**all))(img=img,",
)


@pytest.mark.skipif(not ALL, reason="starts a server of its own: by PIPEMESH_TEST_ALL")
def test_the_image_is_stocks_while_a_model_is_compared_and_the_next_one_is_the_pools(host, models, tmp_path):
    tree, name = tmp_path / "ComfyUI", FLUX_FILES[1]
    linked(Path(COMFYUI), tree, {name, "main.py"})  # Python follows a link to a script
    text = (tree / name).read_text()
    assert BRACKET[0] in text
    (tree / name).write_text(text.replace(*BRACKET))
    with start(replace(host, comfyui=str(tree)), models, tries_hosts=True) as server:
        stock, _ = latent(server, graph("stock", parallel=False, seed=5))
        switch(server, True)
        ours, _ = latent(server, graph("compared", parallel=False, seed=6))
        status = server.get("/pipemesh/status")
        assert runs(server) == 0.0
        assert any("is being compared with stock" in one["text"] for one in status["notices"])
        assert status["host"]["pending"] == ["Flux"]
        until = time.monotonic() + 300
        while not server.get("/pipemesh/status")["host"]["verified"]:
            assert time.monotonic() < until
            time.sleep(0.5)
        assert server.get("/pipemesh/status")["host"]["verified"] == ["Flux"]
        again, _ = latent(server, graph("pooled", parallel=False, seed=5))
        assert runs(server) > 0.0
        assert relative_error(again, stock) <= BOUND
        switch(server, False)
        truth, _ = latent(server, graph("beside", parallel=False, seed=6))
        assert (ours == truth).all()
