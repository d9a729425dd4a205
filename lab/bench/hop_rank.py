"""Start a rank of the hop's pool: the product's own rank, whose model can be told to take no time.

An evaluation with ``costs_nothing`` in its transformer options returns its latent at once; any
other runs the model.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COSTS_NOTHING = "costs_nothing"


def main() -> None:
    sys.path[0] = str(ROOT / "pool")  # as if the product's script had been started
    from package import register_package

    register_package(ROOT)
    from pipemesh.parallel_runtime.worker import resident_model
    from pipemesh.pool import worker_main

    stock = resident_model.ResidentModel.on_rank

    def on_rank(model: resident_model.ResidentModel, arguments: dict, *rest: object) -> object:
        return (
            arguments["x"]
            if arguments["transformer_options"].get(COSTS_NOTHING)
            else stock(model, arguments, *rest)
        )

    resident_model.ResidentModel.on_rank = on_rank
    worker_main.main()


if __name__ == "__main__":
    main()
