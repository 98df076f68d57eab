"""The command line: one file a command, imported only when that command runs.

Here configuration is read, once, and the rooms that do not know each other (gateway, worker, deploy) are put together.
"""
