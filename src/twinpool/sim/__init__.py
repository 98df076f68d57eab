"""Virtual time: the controller that the gateway runs, fed by a model of the engines instead of by sockets.

    workload ──Offered──► driver ──event──► Controller.handle ──commands──► driver ──legs──► engine, link
                             ▲                                                                   │
                             └────────────────── what became of them, at its time ◄──────────────┘

`loop` is the clock, `cost` and `engine` are the truth about the workers (the policies never see it, and guess with formulas of
their own), `link` the handoff, `faults` what goes wrong, `driver` plays the gateway's part, `scenario` says what is simulated
and `run` does it."""
