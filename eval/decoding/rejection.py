"""Rejection sampling for chains: the drafter samples, and the target accepts with probability min(1, p/q).

The other rule of this project, sample-match (`verification.py`), takes the target's own sample and looks whether it was
proposed. Rejection sampling accepts more often, is exact too, and holds for chains only. q is the very fp32
distribution that the draft was drawn from. A rejected position is drawn again from the residual max(p - q, 0); a chain
that is accepted whole earns a bonus token from p. Drafts, tests and residuals use random streams of their own (TRAP
37); as a position consumes one uniform of each stream whenever it is settled, an answer does not depend on its
neighbours.

Sources: METHODS section 3 (DeepSpec, transformers); Leviathan et al., arXiv 2211.17192.

Shape suffixes: R requests, T depths, M chain tokens (root first), V vocabulary of the target, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from models.bundle import Drafter

from .confidence import cut_chain
from .tree import Distributions, Draft, Tree, check_logits
from .verification import Verification, choose_tokens, invert


def sampled_chain(draft: Draft, drafter: Drafter, embed, options, chain: Callable[..., Tree], use_head: bool) -> Tree:
    """A token of the drafter's own distribution at every depth, left to right, with these distributions.

    Args:
        draft: with `temperature` and `uniforms_RT`. At temperature 0 the distribution is a point: `chain` is built.
        chain: builder of the argmax chain.
    """
    if draft.temperature == 0:
        return chain(draft, drafter, embed, options)
    check_logits(draft.logits_RTV)
    head = drafter.model.head if use_head else None
    corrected = drafter.model.corrected_depths().tolist()
    requests, depths, _ = draft.logits_RTV.shape
    if head is not None:
        slots = head.prepare(draft.hidden_RTD)
        state = head.initial_state(draft.anchor_R, embed)
    tokens, scores, probs = [], [], []
    score = draft.logits_RTV.new_zeros(requests)
    for t in range(depths):
        logits_RU = draft.logits_RTV[:, t]
        if head is not None and corrected[t]:
            logits_RU = logits_RU + (head.code(state, slots[:, t]) @ head.rows().T).float()
        probs_RU = torch.softmax(logits_RU / draft.temperature, dim=-1)
        index_R = invert(probs_RU, draft.uniforms_RT[:, t])
        score = score + probs_RU.gather(1, index_R[:, None]).squeeze(1).log()
        tokens.append(drafter.to_target_ids(index_R))
        scores.append(score)
        probs.append(probs_RU)
        if head is not None and t + 1 < depths:
            state = head.advance(state, tokens[-1], embed, slots[:, t])
    order = torch.arange(depths, device=score.device).expand(requests, -1)
    tree = Tree(
        torch.stack(tokens, 1),
        order,
        order + 1,
        torch.stack(scores, 1),
        order,
        [depths] * requests,
        Distributions(torch.stack(probs, 1), drafter.draft_ids),
    )
    # The confidence head judges the drafter's final logits, which are the base logits where there is no head. It looks
    # at the tokens before a position and never at the one drawn there, so that a cut does not bias what is emitted.
    return cut_chain(tree, draft, drafter, options) if head is drafter.model.head else tree


def verify_rejection(
    logits_RMV: Tensor, tree: Tree, temperature: float, accept_RS: Tensor, draw_RS: Tensor
) -> Verification:
    """Walks each chain: token t is kept when u < p/q, else replaced by a draw of the residual, which ends the walk.

    Args:
        logits_RMV: the target's logits at the root and at each token of the chain.
        tree: of `sampled_chain`, with `drawn_from`.
        accept_RS: uniforms of the tests at the successive positions, S > depth.
        draw_RS: uniforms of the residual or bonus draw at these positions.
    """
    requests, depth = tree.tokens_RN.shape
    rows = torch.arange(requests, device=logits_RMV.device)
    alive_R = torch.ones_like(rows, dtype=torch.bool)
    accepted_R, last_R = torch.zeros_like(rows), torch.zeros_like(rows)
    sizes_R = torch.tensor(tree.sizes, device=rows.device)
    for t in range(depth + 1):
        if not bool(alive_R.any()):
            break
        logits_RV = logits_RMV[:, t].float()
        whole_R = alive_R & (sizes_R == t)
        if bool(whole_R.any()):
            last_R = torch.where(whole_R, choose_tokens(logits_RV, temperature, draw_RS[:, t]), last_R)
            alive_R = alive_R & ~whole_R
        if t == depth:
            break
        if torch.isnan(logits_RV).any():
            raise ValueError("the target's logits hold NaN: its weights or dtype are broken")
        p_RV, token_R = torch.softmax(logits_RV / temperature, dim=-1), tree.tokens_RN[:, t]
        q_RV = tree.drawn_from.at(t, logits_RV.shape[-1])
        # u < p/q without the division: q is positive, since the token was drawn from it.
        kept_R = accept_RS[:, t] * q_RV[rows, token_R].double() < p_RV[rows, token_R].double()
        residual_RV = (p_RV - q_RV).clamp(min=0)
        # Where p and q agree to the last bit nothing is left, and nothing is rejected either.
        residual_RV = torch.where(residual_RV.sum(dim=1, keepdim=True) > 0, residual_RV, p_RV)
        last_R = torch.where(alive_R & ~kept_R, invert(residual_RV, draw_RS[:, t]), last_R)
        alive_R = alive_R & kept_R
        accepted_R = accepted_R + alive_R
    paths, emitted = [], []
    tokens = tree.tokens_RN.tolist()
    for count, last, chain in zip(accepted_R.tolist(), last_R.tolist(), tokens, strict=True):
        paths.append(list(range(count)))
        emitted.append([*chain[:count], last])
    return Verification(paths, emitted)
