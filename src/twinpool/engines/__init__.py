"""To speak to an engine: `probe` asks what it is, `answers` reads what its answers and its silences mean, `events` finds the
first token in a stream. `scripted` is the in-tree fake that every fault can be played on."""
