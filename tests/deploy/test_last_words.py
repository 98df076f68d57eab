from twinpool.deploy.last_words import reason

VLLM = """
(EngineCore pid=41) ERROR 12-01 03:58:29 [core.py:1040] EngineCore failed to start.
(EngineCore pid=41) ERROR 12-01 03:58:29 [core.py:1040] Traceback (most recent call last):
(EngineCore pid=41) ERROR 12-01 03:58:29 [core.py:1040]   File "core.py", line 1031, in run_engine_core
(EngineCore pid=41) ERROR 12-01 03:58:29 [core.py:1040] ValueError: To serve one request of 8192 tokens, 1.9 GiB are needed
Traceback (most recent call last):
  File "/opt/vllm/bin/vllm", line 10, in <module>
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
""".splitlines()


def test_the_cause_and_not_what_it_ended_in() -> None:
    assert reason(VLLM) == "ValueError: To serve one request of 8192 tokens, 1.9 GiB are needed"


def test_names_of_exceptions_come_with_their_module() -> None:
    assert reason(["torch.OutOfMemoryError: CUDA out of memory."]) == "torch.OutOfMemoryError: CUDA out of memory."
    assert reason(["(pid=1) huggingface_hub.errors.RepoNotFoundError: 404"]) == "huggingface_hub.errors.RepoNotFoundError: 404"


def test_without_an_exception_the_last_line_speaks() -> None:
    assert reason(["usage: vllm serve", "vllm: error: unrecognized arguments: --foo", "", " "]) == (
        "vllm: error: unrecognized arguments: --foo"
    )


def test_a_wrapper_alone_is_better_than_nothing() -> None:
    assert reason(VLLM[-1:]) == VLLM[-1]


def test_our_own_workers_say_it_in_their_last_line() -> None:
    assert reason(["ValueError: seen and mended", "twinpool: the model is no model"]) == "the model is no model"


def test_nothing_written_is_no_reason() -> None:
    assert reason(["", "  "]) == ""
