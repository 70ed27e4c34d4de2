"""Recorded agreement in a file: what each drafter of a pool would have proposed at every position of real answers.

An npz of plain arrays (nothing is unpickled), R requests, D drafters, P positions in all, drafts of up to K tokens:

    header        JSON: format, model, draft_len (K), temperature, drafters (their names), kinds (of their options)
    ids, domains  (R,) strings          prompt_lens, output_lens  (R,) int32
    drafted       (D, P) uint8: tokens of the draft that follows p tokens of output; request r has the positions
                  sum(output_lens[:r]) + p for p from 0 to output_lens[r] - 1
    right         (D, P) uint8: how many of them, from the first on, are the answer's
    confidences   (D, P, K) uint16: of each draft token, in steps of 1/65535; 0 behind the end of a draft
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from cluster.config import Count, Section
from cluster.errors import InvalidField
from simulator.agreement import CONFIDENCE_STEPS, MAX_DRAFT_LEN, Agreement, AgreementAnswer

FORMAT = 2


class Header(Section):
    format: int
    model: str
    draft_len: Count
    temperature: float
    drafters: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class AgreementRecording:
    """As the module says."""

    header: Header
    ids: tuple[str, ...]
    domains: tuple[str, ...]
    prompt_lens: NDArray[np.int32]
    output_lens: NDArray[np.int32]
    drafted: NDArray[np.uint8]
    right: NDArray[np.uint8]
    confidences: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.output_lens, dtype=np.int64)])

    def answer(self, number: int, drafters: Sequence[str] | None = None) -> AgreementAnswer:
        """Of one request, with all drafters, or some."""
        part = slice(int(self.starts[number]), int(self.starts[number + 1]))
        return AgreementAnswer(
            int(self.output_lens[number]),
            {
                name: Agreement(self.drafted[j, part].tobytes(), self.right[j, part].tobytes(), self.confidences[j, part])
                for j, name in enumerate(self.header.drafters)
                if drafters is None or name in drafters
            },
        )

    def accepted_len(self, drafter: str) -> float:
        """Tokens of a round with the bonus token, mean over rounds when every draft is verified whole."""
        num_rounds = num_tokens = 0
        for right in np.split(self.right[self.header.drafters.index(drafter)], self.starts[1:-1]):
            position = 1  # the first comes with the prompt
            num_tokens += len(right) - 1
            while position < len(right):
                position += int(right[position]) + 1
                num_rounds += 1
        return num_tokens / num_rounds if num_rounds else 1.0

    def save(self, path: Path) -> None:
        """Raises InvalidField when the file cannot be written."""
        arrays = {
            "header": np.array(self.header.model_dump_json()),
            "ids": np.array(self.ids),
            "domains": np.array(self.domains),
            "prompt_lens": self.prompt_lens,
            "output_lens": self.output_lens,
            "drafted": self.drafted,
            "right": self.right,
            "confidences": self.confidences,
        }
        try:
            with path.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
        except OSError as error:
            raise InvalidField("recording", str(path), f"cannot be written ({error.strerror})") from error


def read_recording(path: Path) -> AgreementRecording:
    """Raises InvalidField: the file is missing, damaged, of another format, or disagrees with itself; says how."""

    def refuse(why: str) -> InvalidField:
        return InvalidField("recording", str(path), f"{why}; `outrider bench policies` makes one where there is none")

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = Header.model_validate_json(str(arrays["header"]))
        found = AgreementRecording(
            header,
            tuple(map(str, arrays["ids"].tolist())),
            tuple(map(str, arrays["domains"].tolist())),
            *(arrays[name] for name in ("prompt_lens", "output_lens", "drafted", "right", "confidences")),
        )
    except FileNotFoundError as error:
        raise refuse("is not there") from error
    except ValidationError as error:
        raise refuse(f"its header does not fit: {error.errors()[0]['msg']}") from error
    except KeyError as error:
        raise refuse(f"holds no {error}") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise refuse(f"cannot be read: {error}") from error
    problem = _problem(found)
    if problem is not None:
        raise refuse(problem)
    return found


def _problem(found: AgreementRecording) -> str | None:
    header = found.header
    if header.format != FORMAT:
        return f"is of format {header.format}, this version reads {FORMAT}"
    num_requests, num_drafters = len(found.ids), len(header.drafters)
    if not num_requests or not num_drafters or header.draft_len > MAX_DRAFT_LEN:
        return f"holds {num_requests} requests, {num_drafters} drafters and drafts of {header.draft_len}"
    if len(header.kinds) != num_drafters or len(set(header.drafters)) != num_drafters:
        return "its drafters and their kinds do not fit each other"
    if found.output_lens.ndim != 1 or (found.output_lens < 1).any() or (found.prompt_lens < 1).any():
        return "a prompt or an answer has no token"
    num_positions = int(found.output_lens.sum())
    shapes = {
        "domains": (len(found.domains), num_requests),
        "prompt_lens": (found.prompt_lens.shape, (num_requests,)),
        "output_lens": (found.output_lens.shape, (num_requests,)),
        "drafted": (found.drafted.shape, (num_drafters, num_positions)),
        "right": (found.right.shape, (num_drafters, num_positions)),
        "confidences": (found.confidences.shape, (num_drafters, num_positions, header.draft_len)),
    }
    for name, (actual, wanted) in shapes.items():
        if actual != wanted:
            return f"its {name} are {actual}, where {wanted} was expected"
    kinds = {"drafted": np.uint8, "right": np.uint8, "confidences": np.uint16}
    for name, kind in kinds.items():
        if getattr(found, name).dtype != kind:
            return f"its {name} are {getattr(found, name).dtype}, where {np.dtype(kind)} was expected"
    if (found.right > found.drafted).any() or (found.drafted > header.draft_len).any():
        return "more tokens are right than drafted, or more were drafted than asked for"
    left = np.concatenate([np.arange(n, 0, -1) for n in found.output_lens.tolist()])
    if (found.right > left).any():
        return "more tokens are right than the answer has"
    return None


class Recorder:
    """Collects answers one by one; ``drafters`` are (name, kind of its options)."""

    def __init__(self, model: str, drafters: Sequence[tuple[str, str]], draft_len: int, temperature: float) -> None:
        self.header = Header(
            format=FORMAT,
            model=model,
            draft_len=draft_len,
            temperature=temperature,
            drafters=tuple(name for name, _ in drafters),
            kinds=tuple(kind for _, kind in drafters),
        )
        self._rows: list[tuple[str, str, int, int]] = []
        self._parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint16]]] = []

    def add(self, name: str, domain: str, prompt_len: int, drafts: Sequence[Sequence[tuple[int, Sequence[float]]]]) -> None:
        """An answer. ``drafts[j][p]``: of drafter j at position p, how many tokens were right, and all confidences."""
        num_drafters, output_len, draft_len = len(self.header.drafters), len(drafts[0]), self.header.draft_len
        drafted = np.zeros((num_drafters, output_len), np.uint8)
        right = np.zeros((num_drafters, output_len), np.uint8)
        confidences = np.zeros((num_drafters, output_len, draft_len), np.uint16)
        for j, of_drafter in enumerate(drafts):
            for p, (num_right, told) in enumerate(of_drafter):
                right[j, p], drafted[j, p] = num_right, len(told)
                confidences[j, p, : len(told)] = np.rint(np.array(told, np.float64) * CONFIDENCE_STEPS)
        self._rows.append((name, domain, prompt_len, output_len))
        self._parts.append((drafted, right, confidences))

    def recording(self) -> AgreementRecording:
        drafted, right, confidences = zip(*self._parts, strict=True)
        return AgreementRecording(
            self.header,
            tuple(row[0] for row in self._rows),
            tuple(row[1] for row in self._rows),
            np.array([row[2] for row in self._rows], np.int32),
            np.array([row[3] for row in self._rows], np.int32),
            np.concatenate(drafted, axis=1),
            np.concatenate(right, axis=1),
            np.concatenate(confidences, axis=1),
        )
