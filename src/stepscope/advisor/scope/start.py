"""Start `launch` with nothing imported from the current folder or the folder of the script.

    python .../start.py FOLDER ORDER

Run by its path, not with `-m` or `-P`: the first would put the current folder on `sys.path`, the
second would change `sys.flags` of the script.
"""

import signal
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # The folder of this file.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the script runs, Ctrl-C has no traceback to show; `main` restores the handler.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from stepscope.advisor.scope.launch import main

    main(*sys.argv[1:3])
