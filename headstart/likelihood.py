"""How likely a model finds an answer: log-likelihoods in batches, with logits only where a token is scored."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from headstart.prompt import IGNORED, Row

CHUNK = 1024  # tokens whose logits are held at once


@torch.inference_mode()
def mean_log_likelihoods(model: Any, rows: Sequence[Row], batch_size: int) -> list[float]:
    """Mean log-likelihood, in nats a token, of each row's labelled tokens from what stands before them.

    Rows of like length share a batch; no result depends on its batch (float32; in bfloat16 by rounding).
    """
    results = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda at: (len(rows[at].ids), at))
    for begin in range(0, len(order), batch_size):
        part = order[begin : begin + batch_size]
        for at, score in zip(part, _batch(model, [rows[at] for at in part]), strict=True):
            results[at] = score
    return results


def _batch(model: Any, rows: Sequence[Row]) -> list[float]:
    ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True).to(model.device)
    labels = pad_sequence([torch.tensor(row.labels) for row in rows], batch_first=True, padding_value=IGNORED)
    lengths = torch.tensor([len(row.ids) for row in rows], device=model.device)
    mask = torch.arange(ids.shape[1], device=model.device)[None] < lengths[:, None]
    targets = labels[:, 1:].to(model.device)
    at, place = (targets != IGNORED).nonzero(as_tuple=True)
    hidden = model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    scored, wanted = hidden[at, place].split(CHUNK), targets[at, place].split(CHUNK)
    scores = torch.cat(
        [head(h).float().log_softmax(-1).gather(-1, t[:, None])[:, 0] for h, t in zip(scored, wanted, strict=True)]
    )
    sums = torch.zeros(len(rows), device=model.device).index_add(0, at, scores)
    return (sums / torch.bincount(at, minlength=len(rows))).tolist()
