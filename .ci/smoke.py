"""Is this installation of Twinpool whole? ``python smoke.py tools|local TWINPOOL``, with the standard library only."""

# ruff: noqa: S101, S310, S603, T201  # a script that asserts, prints, and starts and asks only what it was given

import json
import signal
import subprocess
import sys
import urllib.request

program, *_ = sys.argv[2:]


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([program, *args], capture_output=True, text=True, timeout=60)


def ask(url: str, body: dict[str, object] | None = None) -> dict[str, object]:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def serve(*args: str) -> "subprocess.Popen[str]":
    command = [program, "serve", "--port", "0", "--admin-port", "0", "--json", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def stop(service: "subprocess.Popen[str]") -> None:
    service.send_signal(signal.SIGTERM)
    rest, _ = service.communicate(timeout=60)
    assert (service.returncode, rest) == (0, ""), (service.returncode, rest)


def tools() -> None:
    assert run("--version").stdout.startswith("twinpool ")
    for command in ("serve", "worker", "status", "bench", "check", "compare", "replay"):
        assert command in run("-h").stdout
        assert run(command, "-h").returncode == 0, command
    lacking = run("serve", "--port", "0", "--admin-port", "0")
    assert lacking.returncode == 2, lacking
    assert lacking.stderr.count("\n") == 1, lacking.stderr
    assert "pip install 'twinpool[local]'" in lacking.stderr, lacking.stderr


def local() -> None:
    service = serve()
    try:
        ready = json.loads(service.stdout.readline())
        print(f"ready after {ready['ready_s']} s")
        url, [model] = ready["gateway"]["url"], ready["gateway"]["models"]
        question = {"model": model, "max_tokens": 16, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        answer = ask(f"{url}/v1/chat/completions", question)
        assert answer["choices"][0]["message"]["content"].strip(), answer
        [decision] = ask(f"{ready['admin_url']}/admin/state")["decisions"]
        assert decision["choice"] == "disaggregated", decision
        for path in ("", "page/live.js", "page/chart.umd.min.js"):
            with urllib.request.urlopen(f"{ready['admin_url']}/{path}", timeout=60) as file:
                assert file.read(), path
        stop(service)
    finally:
        service.kill()


{"tools": tools, "local": local}[sys.argv[1]]()
print("well")
