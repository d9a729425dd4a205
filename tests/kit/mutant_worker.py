"""A rank with one thing broken, whatever FILE names when a model is loaded: ``mutant_worker.py FILE
SOCKET_FD PARENT_PID``.

Shows that tests can go red.
"""

import sys
from pathlib import Path

from as_worker import register, run_worker
from mutants import sequence, stages
from mutants.seams import models, put, rooms

MUTANTS = {**vars(sequence), **vars(stages)}


def break_at_every_load(named_in):
    """What was broken for the model before is whole again."""

    def broken(real):
        def init(self, *args):
            for owner, was in whole:
                for name in vars(owner).keys() - was.keys():
                    delattr(owner, name)
                for name, value in was.items():
                    if vars(owner)[name] is not value:
                        setattr(owner, name, value)
            MUTANTS[named_in.read_text()]()
            models.add(self)
            real(self, *args)

        return init

    put(rooms.resident_model.ResidentModel, "__init__", broken)
    put(rooms.resident_vae.ResidentVAE, "__init__", broken)
    whole = [(owner, dict(vars(owner))) for owner in rooms.owners]


if __name__ == "__main__":
    mutation_file = Path(sys.argv.pop(1))
    register()
    rooms.enter()
    break_at_every_load(mutation_file)
    run_worker()
