"""Takes a GGUF from the Hugging Face hub, through its own library: HF_HOME, HF_TOKEN and HF_HUB_OFFLINE hold."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from twinpool.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

# Q8_0 first: it reads prompts fastest on a CPU and loses least. Then from the usual choice outwards.
PREFERRED = ("Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q4_K_S", "Q5_K_S", "Q4_0", "F16", "BF16")

LISTING_TIMEOUT_S = 10.0

_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)
_QUANTISATION = re.compile(r"[-._](?:i?q\d\w*|b?f16|f32|mxfp4\w*|tq\d\w*)$", re.IGNORECASE)
_NOT_A_MODEL = ("mmproj", "imatrix")  # GGUFs that go beside a model


def served_name(file_name: str) -> str:
    """The name a GGUF is served under: without its ending, its shard's number and its quantisation."""
    return _QUANTISATION.sub("", _SHARD.sub("", file_name).removesuffix(".gguf")) or file_name


def fetch_from_hub(repo: str, wanted: str | None, progress: "Progress") -> Path:
    """The path of the repository's GGUF in the hub's cache, downloaded if need be: ``wanted``, or a sensible one.

    ``wanted`` is a file's path in the repository or a quantisation such as ``Q4_K_M``.
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )
    except ModuleNotFoundError as missing:
        raise UserError(f"models from the hub need {missing.name}: pip install 'twinpool[local]'") from None
    # What the library's HTTP client raises: its releases use requests, httpx or a successor of it.
    http_error = cast("type[Exception]", HfHubHTTPError.__bases__[0])

    def names_in_cache() -> list[str]:
        with suppress(LocalEntryNotFoundError):
            folder = Path(snapshot_download(repo, allow_patterns="*.gguf", local_files_only=True))
            return [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]
        return []

    progress.live.stop()  # the library draws bars of its own
    try:
        try:
            siblings = HfApi().model_info(repo, timeout=LISTING_TIMEOUT_S).siblings or []
            names, is_cached = [sibling.rfilename for sibling in siblings], False
        except (RepositoryNotFoundError, HFValidationError):
            raise
        except (OSError, http_error):
            names, is_cached = names_in_cache(), True
            if not names:
                raise
        files = choose_gguf(repo, names, wanted)
        paths = [Path(hf_hub_download(repo, file, local_files_only=is_cached)) for file in files]
        return paths[0]
    except GatedRepoError:
        raise UserError(f"{repo} is gated: accept its terms on the hub, then set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise UserError(f"no {repo} on the hub: check the name; a private one needs HF_TOKEN") from None
    except HFValidationError:
        raise UserError(f"{repo} cannot be a name on the hub: it takes repo/name[:file]") from None
    except OfflineModeIsEnabled:
        raise UserError(f"{repo} is not in the hub's cache and HF_HUB_OFFLINE is set: unset it, or give a path") from None
    except LocalEntryNotFoundError:
        raise _unreachable(repo, "no connection") from None
    except EntryNotFoundError:
        raise UserError(f"{repo} lists a file that it does not have: name another as {repo}:FILE") from None
    except HfHubHTTPError as problem:
        raise _unreachable(repo, f"it answered {problem.response.status_code}") from None
    except (OSError, http_error) as problem:
        reason = getattr(problem, "strerror", None) or "no connection"
        raise _unreachable(repo, reason) from None
    finally:
        progress.live.start()


def choose_gguf(repo: str, names: Sequence[str], wanted: str | None) -> list[str]:
    """The files to fetch, the one to open first; more than one when the model is split into shards."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not any(word in name.lower() for word in _NOT_A_MODEL):
            models.setdefault(_SHARD.sub("", name), []).append(name)
    if not models:
        raise UserError(f"{repo} has no GGUF: look for a repository whose name ends in -GGUF")
    listed = ", ".join(models)
    if wanted and wanted.lower().endswith(".gguf"):
        if (shards := models.get(_SHARD.sub("", wanted))) is None:
            raise UserError(f"{repo} has no {wanted}: it has {listed}")
        return shards
    if not wanted and len(models) == 1:
        return next(iter(models.values()))
    for quantisation in (wanted,) if wanted else PREFERRED:
        tag = re.compile(rf"(?:^|[-._/]){re.escape(quantisation)}(?=[-._/])", re.IGNORECASE)
        matching = [model for model in models if tag.search(model)]
        if len(matching) == 1:
            return models[matching[0]]
        if matching:
            raise UserError(f"{repo} has several: name one as {repo}:FILE out of {', '.join(matching)}")
    raise UserError(f"{repo} does not say which: name one as {repo}:FILE out of {listed}")


def _unreachable(repo: str, reason: str) -> UserError:
    return UserError(f"cannot fetch {repo} from the hub: {reason}; check the network and HF_ENDPOINT, or give a path")
