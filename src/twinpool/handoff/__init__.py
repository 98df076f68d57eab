"""How a handoff is written into two HTTP bodies, one file a dialect. Pure: bytes in, bytes out.

`nixl` is the form of vLLM's NIXL connector and of the embedded worker: legs one after the other. (SGLang's, both legs at
once, has its rows in the lifecycle's table and comes with its engine.) `body` takes a client's body apart and puts it
together again without touching what it does not know.
"""
