"""A reference drafter written from the formulas of METHODS sections 1 and 2: loops and plain torch.

One block of one request. Shape suffixes: S context, B block slots, D hidden, V vocabulary.
"""

from __future__ import annotations

import math

import torch


def rms(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x, position, frequencies):
    """RoPE on one head vector at one position; a vector longer than the frequencies keeps its rest."""
    half = len(frequencies)
    angle = position * frequencies
    first, second, rest = x[:half], x[half : 2 * half], x[2 * half :]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin(), rest])


def plain_frequencies(head_dim, theta=10000.0):
    return torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])


def sees_block(layer, slot, anchor, position):
    """Plain DFlash: the context before the anchor and the whole block."""
    return True


def hidden_states(w, taps_SL, embeds_BD, heads=4, kv_heads=2, head_dim=8, frequencies=None, sees=sees_block):
    """Output of the last norm at each slot [B, D]. `sees(layer, slot, anchor, position)` says which keys a slot has."""
    frequencies = plain_frequencies(head_dim) if frequencies is None else frequencies
    context = rms(taps_SL @ w["fc.weight"].T, w["hidden_norm.weight"])
    anchor, slots = len(taps_SL), len(embeds_BD)
    block, layer = embeds_BD, 0
    while f"layers.{layer}.input_layernorm.weight" in w:
        p = f"layers.{layer}."
        normed = rms(block, w[p + "input_layernorm.weight"])
        source = torch.cat([context, normed])
        rows = []
        for slot in range(slots):
            outs = []
            for head in range(heads):
                kv = head // (heads // kv_heads)
                part, kv_part = slice(head * head_dim, (head + 1) * head_dim), slice(kv * head_dim, (kv + 1) * head_dim)
                q = rms(normed[slot] @ w[p + "self_attn.q_proj.weight"][part].T, w[p + "self_attn.q_norm.weight"])
                q = turn(q, anchor + slot, frequencies)
                scores, values = [], []
                for position in range(anchor + slots):
                    if sees(layer, slot, anchor, position):
                        k = source[position] @ w[p + "self_attn.k_proj.weight"][kv_part].T
                        k = turn(rms(k, w[p + "self_attn.k_norm.weight"]), position, frequencies)
                        scores.append(q @ k / math.sqrt(head_dim))
                        values.append(source[position] @ w[p + "self_attn.v_proj.weight"][kv_part].T)
                outs.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
            rows.append(torch.cat(outs) @ w[p + "self_attn.o_proj.weight"].T)
        block = block + torch.stack(rows)
        inner = rms(block, w[p + "post_attention_layernorm.weight"])
        gate, up = inner @ w[p + "mlp.gate_proj.weight"].T, inner @ w[p + "mlp.up_proj.weight"].T
        block = block + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        layer += 1
    return rms(block, w["norm.weight"])


def domino_correction(w, h, consumed, embedding):
    """W2 SiLU(W1 [h ; s]), s the bias-free GRU's state after the consumed tokens (gate order r, z, n)."""
    size = w["prefix_gru.weight_hh_l0"].shape[1]
    s = torch.zeros(size)
    for token in consumed:
        i = (embedding[token] @ w["prefix_gru.weight_ih_l0"].T).split(size)
        g = (s @ w["prefix_gru.weight_hh_l0"].T).split(size)
        r, z = torch.sigmoid(i[0] + g[0]), torch.sigmoid(i[1] + g[1])
        n = torch.tanh(i[2] + r * g[2])
        s = (1 - z) * n + z * s
    inner = torch.cat([h, s]) @ w["embed_proj.0.weight"].T
    return (inner * torch.sigmoid(inner)) @ w["embed_proj.2.weight"].T


def markov_corrections(w, hidden, tokens, kind):
    """Corrections at successive depths, `tokens` being the previous token of each; vanilla, gated or rnn."""
    w1, w2 = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
    s, found = torch.zeros(w1.shape[1]), []
    for h, token in zip(hidden, tokens, strict=True):
        x = w1[token]
        code = x
        if kind == "gated":
            code = x * torch.sigmoid(
                torch.cat([h, x]) @ w["markov_head.gate_proj.weight"].T + w["markov_head.gate_proj.bias"]
            )
        if kind == "rnn":
            z = torch.cat([s, x, h]) @ w["markov_head.joint_proj.weight"].T + w["markov_head.joint_proj.bias"]
            g, c, o = z.chunk(3)
            s = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
            code = torch.tanh(o)
        found.append(w2 @ code)
    return found


def chain(w, hidden_TD, head, anchor_token, embedding, lm_head, prefix=0, draft_ids=None):
    """Greedy tokens left to right and the logits that chose them; hidden states are those of the predicting slots."""
    tokens, rows = [anchor_token], []
    for depth, h in enumerate(hidden_TD):
        logits = lm_head @ h
        if head == "domino" and depth >= prefix:
            logits = logits + domino_correction(w, h, tokens, embedding)
        elif head.startswith("markov_"):
            logits = logits + markov_corrections(w, hidden_TD[: depth + 1], tokens, head.removeprefix("markov_"))[-1]
        rows.append(logits)
        best = int(logits.argmax())
        tokens.append(best if draft_ids is None else draft_ids[best])
    return tokens[1:], torch.stack(rows)
