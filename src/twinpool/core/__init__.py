"""The pure heart: events in, commands out. `model` and `decisions` are its words, `lifecycle` its tables, `cluster` what it
knows of the workers, `controller` the one writer of all of it."""
