"""Python imports this in every process that a test's server starts: the one that ranks are forked
from imports ComfyUI too, as that of the tests' own pools does (comfyui_at_hand.py).
"""

import sys
from pathlib import Path

# Where one of its modules cannot be imported it starts itself again, with none
if Path(sys.argv[0]).name == "fork_server_main.py" and len(sys.argv) > 3:
    sys.argv.append("pipemesh.tests.kit.comfyui_at_hand")
