#!/usr/bin/env python3
"""Plants faults in chunkflow_cuda.cu and asks which test catches each; for those who change the tests or the kernels.

    make BUILD=build/nosan SANITIZE= build/nosan/cuda/tests      from the top of the tree
    BUILD=build/nosan python3 tests/cuda/cuda_faults.py [part of a fault's name ...]

A copy of the file has all faults in it, each behind a number that the environment gives, so that one more compilation
does for all. For each fault the test that should catch it runs under the emulation, and must fail; without a fault all
of them must pass. No sanitizer is needed, so that all of it takes minutes. Prints a line for each fault, and "N caught,
N missed"; the latter sets the exit status.
"""

import os
import re
import subprocess
import sys

BUILD = os.environ.get("BUILD", "build/nosan")
CXX = os.environ.get("CXX", "c++")

# Name, the text to be replaced (which must be there once), what a fault puts there ({n}: its number), and the tests.
FAULTS = (
    ("swizzle index",
     "(chunk ^ (row & 7)) << 4",
     "(chunk ^ (row & (planted == {n} ? 3 : 7))) << 4",
     "attention.no_empty_blocks_no_conflicts"),
    ("barrier before a key block",
     "__syncthreads();      /* ... everyone is done with V of n + 1 and K of n + 1 */",
     "if (planted != {n}) __syncthreads();",
     "attention.prefixes"),
    ("barrier before V is used",
     "        __syncthreads();\n        multiply_packed<T, ROW>(o, probs",
     "        if (planted != {n}) __syncthreads();\n        multiply_packed<T, ROW>(o, probs",
     "attention.prefixes"),
    ("barrier before P and dS are used",
     "        __syncthreads();\n        multiply_transposed<T, ROWS / 16, P_ROW, ROW>(dv",
     "        if (planted != {n}) __syncthreads();\n        multiply_transposed<T, ROWS / 16, P_ROW, ROW>(dv",
     "attention.prefixes"),
    ("mask edge of the backward",
     "key_end(p.visible, t, first_token) < first_key + KEYS ||",
     "key_end(p.visible, t, first_token) < first_key + KEYS - (planted == {n}) ||",
     "attention.backward_mask_edges"),
    ("full blocks of the forward",
     "load_packed_rows<FORWARD_ROWS, HEAD, FORWARD_THREADS>(\n            q,",
     None,
     "attention.prefixes"),
    ("conditional commit of copies",
     "                                                   p.n_chunks);\n        copy_async_commit();\n\n "
     "       float s[2][KEYS / 8][4];",
     "                                                   p.n_chunks);\n        if (planted != {n} || "
     "n > first) copy_async_commit();\n\n        float s[2][KEYS / 8][4];",
     "attention.prefixes"),
    ("a dropped partial tile",
     "n_blocks = div_up(n_rows, rows);",
     "n_blocks = planted == {n} ? n_rows / rows : div_up(n_rows, rows);",
     "attention.prefixes"),
    ("log-sum of split parts",
     "+ softmax[sum_at / 4][sum_at % 4] * add[i][half];",
     "+ softmax[sum_at / 4][sum_at % 4] * (planted == {n} ? 1.0f : add[i][half]);",
     "attention.split_forward_tiles"),
    ("log-sum with a softcap",
     "r.top[i][half] * (p.scale_log2 * LN_2)",
     "r.top[i][half] * (planted == {n} ? p.scale : p.scale_log2 * LN_2)",
     "attention.masks"),
    ("a join that ignores the accumulator",
     "t.k_length - (int)first_key, column, p.n_chunks * 8, p.overwrite);",
     "t.k_length - (int)first_key, column, p.n_chunks * 8, planted == {n} ? true : p.overwrite != 0);",
     "attention.split_key_tiles"),
    ("dQ not cleared",
     "i < p.sums_of_tile / 4; i +=",
     "i < p.sums_of_tile / 4 && planted != {n}; i +=",
     "attention.prefixes"),
    ("a place without a row that counts",
     "const bool seeing = row < p.row_rows && packed >= begin && packed < n_rows;",
     "const bool seeing = packed >= begin && (row < p.row_rows ? packed < n_rows : planted == {n});",
     "attention.large_scores"),
    ("overwrite on every backward",
     "out.overwrite = is_backward(a.pass) && (!resident || p.overwrite);",
     "out.overwrite = is_backward(a.pass) && (planted == {n} || !resident || p.overwrite);",
     "executor.random_batches"),
    ("rows of a replay shifted",
     "s->row_at[gradient][local_cell(b, a)] * p.row_bytes;",
     "(s->row_at[gradient][local_cell(b, a)] + (planted == {n} && a.pass == CF_R)) * p.row_bytes;",
     "executor.random_batches"),
    ("no wait for a receive",
     "wait_for(is_pass(a.pass)   ? source_of(b, a)",
     "wait_for(is_pass(a.pass)   ? (planted == {n} ? -1 : source_of(b, a))",
     "executor.every_order"),
    ("no wait for a prefetch",
     "if (is_pass(a.pass)) wait_for(group->last_fetch);",
     "if (is_pass(a.pass) && planted != {n}) wait_for(group->last_fetch);",
     "executor.every_order"),
    ("no wait before an offload",
     "if (a.pass == CF_OFFLOAD) wait_for(group->last_pass);",
     "if (a.pass == CF_OFFLOAD && planted != {n}) wait_for(group->last_pass);",
     "executor.every_order"),
    ("no wait before a receive",
     "if (!has_nccl(b->e)) add_wait(r, at, p.peer, p.partner);",
     "if (!has_nccl(b->e) && planted != {n}) add_wait(r, at, p.peer, p.partner);",
     "executor.every_order"),
    ("no wait before an NCCL send",
     ": is_send(a.pass) ? position_of(",
     ": is_send(a.pass) ? planted == {n} ? -1 : position_of(",
     "executor.processes"),
    ("memory that is taken over too early",
     "                    add_wait(r, at, self, o->user);",
     "                    if (planted != {n}) add_wait(r, at, self, o->user);",
     "executor.every_order"),
    ("a failed process that leaves its peers",
     "if (e->failure.code != CF_OK && (e->broken || !has_nccl(e))) return i + 1;",
     "if (e->failure.code != CF_OK && (e->broken || !has_nccl(e) || planted == {n})) return i + 1;",
     "executor.a_process_fails"),
    ("another process's action by the callback's item",
     "(b->schedule->n_actions - e->failed_at)",
     "(b->schedule->n_actions - (planted == {n} ? e->failure.item : e->failed_at))",
     "executor.a_process_fails"),
    ("rows without a state",
     "if (!s->b->e->has_state) return;",
     "if (!s->b->e->has_state && planted != {n}) return;",
     "executor.moves_without_state"),
    ("uneven sections",
     "const bool whole = section < w.n_whole;",
     "const bool whole = section < w.n_whole || planted == {n};",
     "attention.sections_of_heads"),
    ("a section that is always the first",
     "*head = section * w.heads.by + rest",
     "*head = (planted == {n} ? 0 : section) * w.heads.by + rest",
     "attention.sections_of_heads"),
    ("host memory written before it was read",
     "        (void)uses.push(home, std::make_tuple(2 * x.begin, space, low, low + x.size));",
     "        if (space != HOST || planted != {n}) (void)uses.push(home, std::make_tuple(2 * x.begin, space, low, "
     "low + x.size));",
     "executor.every_order"),
    ("state that leaves and arrives on one stream",
     "a.pass == CF_OFFLOAD ? OUT : IN;",
     "a.pass == CF_OFFLOAD || planted == {n} ? OUT : IN;",
     "executor.state_leaves"),
    # Attention by blocks of keys.
    ("window of a block of a prefix",
     "p->desc.window - (keys - (first + n));",
     "p->desc.window - (keys - (first + n)) + (planted == {n});",
     "blocks.windows"),
    ("the first row that a window leaves",
     "std::max<int64_t>(0, prefix - window + 1)",
     "std::max<int64_t>(0, prefix - window + 1 + (planted == {n}))",
     "blocks.windows"),
    ("what earlier blocks left of the output",
     "const int begin = carry & CARRY_LOAD ? t.begin - 1 : t.begin,",
     "const int begin = carry & CARRY_LOAD && planted != {n} ? t.begin - 1 : t.begin,",
     "blocks.fused"),
    ("what earlier blocks left of dQ",
     "    if (p.carry & CARRY_LOAD) {\n",
     "    if (p.carry & CARRY_LOAD && planted != {n}) {\n",
     "blocks.fused"),
    ("what earlier blocks left of dQ by wgmma",
     "    if (carry & CARRY_LOAD) {\n",
     "    if (carry & CARRY_LOAD && planted != {n}) {\n",
     "blocks.wgmma"),
    ("sums of the output that are not scaled down",
     "before == -INFINITY ? 0.0f : expf(before - all);",
     "before == -INFINITY ? 0.0f : planted == {n} ? 1.0f : expf(before - all);",
     "blocks.types"),
    # State that streams.
    ("a slot that is filled again too early",
     "cf_result code = hold(s->desc.in, slot.used, error);",
     "cf_result code = planted == {n} ? CF_OK : hold(s->desc.in, slot.used, error);",
     "blocks.every_order"),
    ("gradients overwritten before they have left",
     "if (code == CF_OK && s->backward) code = hold(s->desc.in, slot.written, error);",
     "if (code == CF_OK && s->backward && planted != {n}) code = hold(s->desc.in, slot.written, error);",
     "blocks.every_order"),
    ("the next load of rows before they are back",
     "    if (code == CF_OK) code = hold(s->desc.in, s->sent, error);\n",
     "    if (code == CF_OK && planted != {n}) code = hold(s->desc.in, s->sent, error);\n",
     "blocks.every_order"),
    ("no wait for a block's copy",
     "const cf_result code = hold(compute, s->slots[number].loaded, error);",
     "const cf_result code = planted == {n} ? CF_OK : hold(compute, s->slots[number].loaded, error);",
     "blocks.every_order"),
    ("gradients that leave before they are done",
     "        code = hold(s->desc.out, slot.used, error);\n",
     "        if (planted != {n}) code = hold(s->desc.out, slot.used, error);\n",
     "blocks.every_order"),
    ("rows that leave before they are computed",
     "    if (code == CF_OK) code = hold(s->desc.out, s->ready, error);\n",
     "    if (code == CF_OK && planted != {n}) code = hold(s->desc.out, s->ready, error);\n",
     "blocks.every_order"),
    ("K and V overwritten before they have left",
     "    if (code == CF_OK) code = hold(compute, s->sent, error); /* of the layer before,",
     "    if (code == CF_OK && planted != {n}) code = hold(compute, s->sent, error); /* of the layer before,",
     "blocks.every_order"),
    ("a pass that ends before its rows have left",
     "    return code == CF_OK ? hold(compute, s->sent, error) : code;\n",
     "    return code == CF_OK && planted != {n} ? hold(compute, s->sent, error) : code;\n",
     "blocks.every_order"),
    ("gradients that nobody added to yet",
     "std::max<int64_t>(0, std::min(i.n, s->touched - i.first));",
     "planted == {n} ? 0 : std::max<int64_t>(0, std::min(i.n, s->touched - i.first));",
     "blocks.windows"),
    ("gradients of the chunk's own rows",
     "s->n_own = s->backward ? n_blocks_of(",
     "s->n_own = s->backward && planted != {n} ? n_blocks_of(",
     "blocks.prefixes"),
    # The executor where the state streams.
    ("a kept input that leaves before it is there",
     "order_streams(own_stream(s, p), input_event(s, INPUT_THERE), out);",
     "planted == {n} ? cudaSuccess : order_streams(own_stream(s, p), input_event(s, INPUT_THERE), out);",
     "executor.inputs_come_back"),
    ("a kept input overwritten before it has left",
     "cudaStreamWaitEvent(own_stream(s, p), input_event(s, INPUT_LEFT), 0)",
     "planted == {n} ? cudaSuccess : cudaStreamWaitEvent(own_stream(s, p), input_event(s, INPUT_LEFT), 0)",
     "executor.inputs_come_back"),
    ("a kept input fetched before it has left",
     "cudaStreamWaitEvent(in, s->on->events[s->plan[kept].event], 0);",
     "planted == {n} ? cudaSuccess : cudaStreamWaitEvent(in, s->on->events[s->plan[kept].event], 0);",
     "executor.inputs_come_back"),
    ("a slot for inputs that is still in use",
     "if (status == cudaSuccess && p.slot_user >= 0)",
     "if (status == cudaSuccess && p.slot_user >= 0 && planted != {n})",
     "executor.inputs_come_back"),
    ("a kept input read before it is back",
     "order_streams(in, input_event(s, INPUT_BACK), own_stream(s, p));",
     "planted == {n} ? cudaSuccess : order_streams(in, input_event(s, INPUT_BACK), own_stream(s, p));",
     "executor.inputs_come_back"),
    ("a pass that a failed callback leaves open",
     "return end_stream(s, step) && left_none &&",
     "return (left_none || planted != {n} ? end_stream(s, step) : false) && left_none &&",
     "executor.a_callback_fails_between_blocks"),
    ("gradients of a group that are overwritten",
     "pass.overwrite = s->plan[step->position].overwrite;",
     "pass.overwrite = planted == {n} || s->plan[step->position].overwrite;",
     "executor.random_batches_streamed"),
    ("rows that a later chunk needs and that stay",
     "out.append = a.pass == CF_F && !is_last_of_group(b->plan, *step->chunk);",
     "out.append = a.pass == CF_F && (planted == {n} ? step->chunk->index == 0 : "
     "!is_last_of_group(b->plan, *step->chunk));",
     "executor.random_batches_streamed"),
    ("one object for blocks that a window cuts",
     "if (n == last && whole) continue;",
     "if (n == last && (whole || planted == {n})) continue;",
     "executor.attention_of_each_block"),
    ("a ring of an earlier batch",
     "    drop_state_stream(s->on);\n    if (!streams_state(e)",
     "    if (planted != {n} || s->on->state_stream == NULL) drop_state_stream(s->on);\n"
     "    else return CF_OK;\n    if (!streams_state(e)",
     "executor.loads_stream_anew"),
    ("a kernel that is not loaded",
     "if (status == cudaSuccess) status = load_rows_of<float, 4>();",
     "if (status == cudaSuccess && planted != {n}) status = load_rows_of<float, 4>();",
     "executor.kernels_are_loaded state.appends"),
    ("rows that are not scaled down",
     "any = any || shrink[i][half] != 1.0f;",
     "any = any || (shrink[i][half] != 1.0f && (planted != {n} || i == 0));",
     "wgmma.one_row_is_scaled_down"),
    # The path with wgmma.
    ("no wait for V",
     "            mbarrier_wait(here + V_FULL, parity);\n",
     "            if (planted != {n}) mbarrier_wait(here + V_FULL, parity);\n",
     "wgmma.shapes"),
    ("no wait for scores",
     "            wgmma_wait<1>();\n            hold_registers(s[0]);\n            if (leader)",
     "            if (planted != {n}) wgmma_wait<1>();\n            hold_registers(s[0]);\n            if (leader)",
     "wgmma.shapes"),
    ("V is free before its product is done",
     "            if (leader) mbarrier_arrive(next + K_EMPTY);\n",
     "            if (leader) mbarrier_arrive(next + K_EMPTY);\n"
     "            if (leader && planted == {n}) mbarrier_arrive(here + V_EMPTY);\n",
     "wgmma.shapes"),
    ("no wgmma.fence after probabilities are packed",
     "        hold_registers(probs);\n        wgmma_fence();\n        hopper_add_values<T>(o[0], probs, "
     "matrix_step(v, stage * layout::TILE));\n        wgmma_wait<0>();",
     "        hold_registers(probs);\n        if (planted != {n}) wgmma_fence();\n        hopper_add_values<T>(o[0], "
     "probs, matrix_step(v, stage * layout::TILE));\n        wgmma_wait<0>();",
     "wgmma.shapes"),
    ("the parity of a free stage of V",
     "    mbarrier_wait(barriers + V_EMPTY, (at >> 1 & 1) ^ 1);",
     "    mbarrier_wait(barriers + V_EMPTY, planted == {n} ? 1 : (at >> 1 & 1) ^ 1);",
     "wgmma.shapes"),
    ("rows of V past a document",
     "    const bool part = i == 0 && valid < HOPPER_KEYS;",
     "    const bool part = i == 0 && valid < HOPPER_KEYS && planted != {n};",
     "wgmma.nan_in_the_next_document"),
    ("no proxy fence after zeros",
     "                        make_uint4(0, 0, 0, 0));\n    fence_proxy_async();",
     "                        make_uint4(0, 0, 0, 0));\n    if (planted != {n}) fence_proxy_async();",
     "wgmma.shapes"),
    ("the step of V's descriptor",
     "wgmma_registers<T, true>(o, probs[i], matrix_step(v, i * 2048), true);",
     "wgmma_registers<T, true>(o, probs[i], matrix_step(v, i * (planted == {n} ? 1024 : 2048)), true);",
     "wgmma.shapes"),
    ("full blocks with wgmma",
     "    if (key + HOPPER_KEYS > rows.full_end ||",
     "    if (key + HOPPER_KEYS - (planted == {n}) > rows.full_end ||",
     "wgmma.mask_edges"),
    ("output over Q in use",
     "    named_barrier<1, HOPPER_CONSUMERS>(); /* nobody",
     "    if (planted != {n}) named_barrier<1, HOPPER_CONSUMERS>(); /* nobody",
     "wgmma.shapes"),
    ("places without a token are not cleared",
     "    zero_rows<128, HEAD, HOPPER_THREADS>(start + layout::Q, p.fused.forward_rows,",
     "    zero_rows<128, HEAD, HOPPER_THREADS>(start + layout::Q, "
     "planted == {n} ? 128 : p.fused.forward_rows,",
     "wgmma.groups"),
    ("more registers than there are",
     "        give_registers_back<40>();\n        if (threadIdx.x >= 32) return;",
     "        if (planted == {n}) give_registers_back<48>();\n        else give_registers_back<40>();\n"
     "        if (threadIdx.x >= 32) return;",
     "wgmma.shapes"),
    ("no proxy fence after dS",
     "(shared_address)(i / 4 * HALF_TILE), slopes[i]);\n    fence_proxy_async();",
     "(shared_address)(i / 4 * HALF_TILE), slopes[i]);\n    if (planted != {n}) fence_proxy_async();",
     "wgmma.groups"),
    ("no barrier after dS",
     "            named_barrier<1, HOPPER_CONSUMERS>(); /* dS",
     "            if (planted != {n}) named_barrier<1, HOPPER_CONSUMERS>(); /* dS",
     "wgmma.shapes"),
    ("one stage of dS",
     "(shared_address)(layout::DS + stage * layout::DS_STAGE),",
     "(shared_address)(layout::DS + (planted == {n} ? 0 : stage) * layout::DS_STAGE),",
     "wgmma.shapes"),
    ("swizzle of dS",
     "((ds_chunk ^ (ds_key & 7)) << 4)",
     "((ds_chunk ^ (ds_key & (planted == {n} ? 3 : 7))) << 4)",
     "wgmma.shapes"),
    ("Q is free before dK is done",
     "            hold_registers(dq);\n            float *sums",
     "            hold_registers(dq);\n            if (leader && planted == {n}) mbarrier_arrive(here + Q_EMPTY);\n"
     "            float *sums",
     "wgmma.shapes"),
    ("no __syncwarp before a stage is free",
     "        __syncwarp();\n        if (leader) {\n            mbarrier_arrive(here + DOUT_EMPTY);",
     "        if (planted != {n}) __syncwarp();\n        if (leader) {\n"
     "            mbarrier_arrive(here + DOUT_EMPTY);",
     "wgmma.shapes"),
    ("keys past a document",
     "    if (n_keys < KEY_TILE) {\n        mbarrier_wait(barriers + TAIL, parity);\n        parity ^= 1;\n"
     "        hopper_clear_ends<128, HEAD>(k, 0, n_keys, 128);",
     "    if (n_keys < KEY_TILE) {\n        mbarrier_wait(barriers + TAIL, parity);\n        parity ^= 1;\n"
     "        if (planted != {n}) hopper_clear_ends<128, HEAD>(k, 0, n_keys, 128);",
     "wgmma.nan_in_the_next_document"),
    ("rows past a document",
     "        const bool part = begin > 0 || end < p.row_rows;",
     "        const bool part = (begin > 0 || end < p.row_rows) && planted != {n};",
     "wgmma.nan_in_the_next_document"),
    ("mask edge of the backward with wgmma",
     "        if (key_end(p.visible, t, first_token) < first_key + 64 ||",
     "        if (key_end(p.visible, t, first_token) < first_key + 64 - (planted == {n}) ||",
     "wgmma.mask_edges"),
    ("dS of rows 64 and on over that of the first",
     "+ (shared_address)(i / 4 * HALF_TILE), slopes[i]);",
     "+ (shared_address)(planted == {n} ? 0 : i / 4 * HALF_TILE), slopes[i]);",
     "attention.wgmma_small_heads"),
    ("rows 64 and on of dQ from dS of the first",
     "const int ds_half = HEAD == 64 ? group * HALF_TILE : 0,",
     "const int ds_half = HEAD == 64 && planted != {n} ? group * HALF_TILE : 0,",
     "attention.wgmma_small_heads"),
    ("no wait for dP",
     "        wgmma_wait<0>();\n        hold_registers(dp);\n        CF_UNROLL\n        for (int j = 0; j < ROWS / 8",
     "        if (planted != {n}) wgmma_wait<0>();\n        hold_registers(dp);\n        CF_UNROLL\n"
     "        for (int j = 0; j < ROWS / 8",
     "wgmma.groups"),
    ("dP starts from log-sums",
     "hopper_start_slopes(dp, stats + ROWS * 4);",
     "hopper_start_slopes(dp, stats + (planted == {n} ? 0 : ROWS * 4));",
     "wgmma.groups"),
    ("dP that does not start from -D",
     "(dp, v, dout_here, true);",
     "(dp, v, dout_here, planted != {n});",
     "wgmma.groups"),
    # dQ by itself.
    ("no wait for V of dQ by itself",
     "        mbarrier_wait(here + DQ_V_FULL, parity);\n",
     "        if (planted != {n}) mbarrier_wait(here + DQ_V_FULL, parity);\n",
     "attention.wgmma_mask_edges"),
    ("no wait for dQ before its K is free",
     "        wgmma_wait<1>();\n        hold_registers(dq[0]);\n        hold_registers(slopes);\n",
     "        if (planted != {n}) wgmma_wait<1>();\n        hold_registers(dq[0]);\n        hold_registers(slopes);\n",
     "attention.wgmma_work_of_the_backward"),
    ("K is free before its dQ is done",
     "        if (leader) mbarrier_arrive(here + DQ_V_EMPTY);\n",
     "        if (leader) mbarrier_arrive(here + DQ_V_EMPTY);\n"
     "        if (leader && planted == {n}) mbarrier_arrive(here + DQ_K_EMPTY);\n",
     "attention.wgmma_dq_in_parts"),
    ("V is free before its dP is done",
     "        wgmma_wait<0>();\n        hold_registers(dp);\n        if (leader) mbarrier_arrive(here + DQ_V_EMPTY);\n",
     "        if (leader && planted == {n}) mbarrier_arrive(here + DQ_V_EMPTY);\n"
     "        wgmma_wait<0>();\n        hold_registers(dp);\n"
     "        if (leader && planted != {n}) mbarrier_arrive(here + DQ_V_EMPTY);\n",
     "attention.wgmma_dq_in_parts"),
    ("the parity of a free stage of dQ by itself",
     "            mbarrier_wait(at + (DQ_K_EMPTY - DQ_K_FULL), (i >> 1 & 1) ^ 1);",
     "            mbarrier_wait(at + (DQ_K_EMPTY - DQ_K_FULL), planted == {n} ? 1 : (i >> 1 & 1) ^ 1);",
     "attention.wgmma_dq_in_parts"),
    ("keys past a document in dQ by itself",
     "            zero_rows<128, HEAD, 32>(to, n_keys, 128, lane);\n            __syncwarp();",
     "            if (planted != {n}) zero_rows<128, HEAD, 32>(to, n_keys, 128, lane);\n            __syncwarp();",
     "wgmma.nan_in_the_next_document"),
    ("mask edge of dQ by itself",
     "        if ((n + 1) * HOPPER_KEYS > full_end ||",
     "        if ((n + 1) * HOPPER_KEYS > full_end + (planted == {n}) ||",
     "attention.wgmma_mask_edges"),
    ("window edge of dQ by itself",
     "n * HOPPER_KEYS < full_begin) {",
     "n * HOPPER_KEYS < full_begin - (planted == {n})) {",
     "attention.wgmma_mask_edges"),
    ("dQ of a row that sees nothing",
     "            if (log_sum[e / 2] == INFINITY) dq[0][j][e] = 0.0f;",
     "            if (log_sum[e / 2] == INFINITY && planted != {n}) dq[0][j][e] = 0.0f;",
     "attention.nan_in_blind_rows"),
    ("the second row tile with the first one's sums",
     "tile_stats(p, head, t.place + rows.row_tile)",
     "tile_stats(p, head, t.place + (planted == {n} ? 0 : rows.row_tile))",
     "wgmma.shapes"),
    ("places without a token in dQ by itself",
     "    for (int i = 0; i < 2 * rows::TILES; i++) /* places",
     "    for (int i = 0; i < 2 * rows::TILES && planted != {n}; i++) /* places",
     "wgmma.groups"),
    ("dQ over Q in use",
     "    named_barrier<1, HOPPER_CONSUMERS>(); /* all are done with Q */\n    hopper_store_dq",
     "    if (planted != {n}) named_barrier<1, HOPPER_CONSUMERS>(); /* all are done with Q */\n    hopper_store_dq",
     "wgmma.shapes"),
    ("parts of dQ in one place",
     "p.part_sums + (head * p.n_parts + part) * (DQ_ROWS * HEAD);",
     "p.part_sums + (head * p.n_parts + (planted == {n} ? 0 : part)) * (DQ_ROWS * HEAD);",
     "attention.wgmma_dq_in_parts"),
    ("a part of dQ too few",
     "    for (int part = t.begin; part < end; part++) {\n        CF_UNROLL\n"
     "        for (int j = 0; j < HEAD / 8; j++) {\n            float x[4];\n            load_quad<HOPPER_CONSUMERS>",
     "    for (int part = t.begin + (planted == {n}); part < end; part++) {\n        CF_UNROLL\n"
     "        for (int j = 0; j < HEAD / 8; j++) {\n            float x[4];\n            load_quad<HOPPER_CONSUMERS>",
     "attention.wgmma_dq_in_parts"),
    ("a log-sum that is not waited for",
     "tile_bytes + (of_dout ? 0 : layout::STATS_STAGE));",
     "tile_bytes + (of_dout || planted == {n} ? 0 : layout::STATS_STAGE));",
     "wgmma.shapes"),
    # Its forward's variants.
    ("a turn that nobody waits for",
     " named_barrier<HOPPER_CONSUMERS>(HOPPER_TURN + consumer);",
     "\n        if (planted != {n}) named_barrier<HOPPER_CONSUMERS>(HOPPER_TURN + consumer);",
     "wgmma.variants"),
    ("no first turn",
     "consumer == 1 && n_blocks > 1);",
     "consumer == 1 && n_blocks > 1 && planted != {n});",
     "wgmma.variants"),
    ("a turn after the last one",
     "(consumer, consumer == 0 || key > t.begin * HOPPER_KEYS);",
     "(consumer, consumer == 0 || key > t.begin * HOPPER_KEYS || planted == {n});",
     "wgmma.variants"),
    ("a turn that is passed to oneself",
     "(HOPPER_TURN + 1 - consumer);",
     "(HOPPER_TURN + (planted == {n} ? consumer : 1 - consumer));",
     "wgmma.variants"),
    ("a turn that one warpgroup makes complete",
     "if (wanted) named_barrier_arrive<HOPPER_CONSUMERS>(HOPPER_TURN",
     "if (wanted && planted == {n}) named_barrier_arrive<128>(HOPPER_TURN + 1 - consumer);\n"
     "        else if (wanted) named_barrier_arrive<HOPPER_CONSUMERS>(HOPPER_TURN",
     "wgmma.variants"),
    ("a tile that nobody takes",
     "return (int)gridDim.x + __shfl_sync(0xFFFFFFFFu, taken, 0);",
     "return (int)gridDim.x + __shfl_sync(0xFFFFFFFFu, taken, 0) + (planted == {n});",
     "wgmma.variants"),
    ("a tile that is taken twice",
     "cudaMemsetAsync(h->taken, 0, sizeof *h->taken, c.stream);",
     "cudaMemsetAsync(h->taken, planted == {n} ? 0xFF : 0, sizeof *h->taken, c.stream);",
     "wgmma.turns"),
    ("Q over output that is not stored yet",
     "mbarrier_wait(barriers + TILE_EMPTY, (turn & 1) ^ 1);",
     "if (planted != {n}) mbarrier_wait(barriers + TILE_EMPTY, (turn & 1) ^ 1);",
     "wgmma.variants"),
    ("no proxy fence before the next Q",
     "        fence_proxy_async();\n        __syncwarp();\n        if (threadIdx.x % 32 == 0) "
     "mbarrier_arrive(barriers + TILE_EMPTY);",
     "        if (planted != {n}) fence_proxy_async();\n        __syncwarp();\n"
     "        if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers + TILE_EMPTY);",
     "wgmma.variants"),
    ("Q is free before its rows are stored",
     "        hopper_forward_rows<T, HEAD, VARIANT>(p, t, head, start, at);",
     "        if (planted == {n} && VARIANT >= HOPPER_PERSISTENT && threadIdx.x % 32 == 0)\n"
     "            mbarrier_arrive(barriers + TILE_EMPTY);\n"
     "        hopper_forward_rows<T, HEAD, VARIANT>(p, t, head, start, at);",
     "wgmma.variants"),
    ("the last V of a tile is never free",
     "if ((VARIANT & HOPPER_PERSISTENT) != 0 && leader)",
     "if ((VARIANT & HOPPER_PERSISTENT) != 0 && leader && planted != {n})",
     "wgmma.variants"),
    ("the parity of a tail",
     "mbarrier_wait(landed, tails++ & 1);",
     "mbarrier_wait(landed, planted == {n} ? 0 : tails++ & 1);",
     "wgmma.variants"),
    ("stages that start anew with each tile",
     "        at.stage = stage ^ 1;",
     "        at.stage = planted == {n} ? 0 : stage ^ 1;",
     "wgmma.variants"),
)


def plant():
    """The file with all faults in it."""
    text = open("chunkflow_cuda.cu").read()
    for number, (name, right, wrong, _) in enumerate(FAULTS, 1):
        if wrong is None:  # the first of two like lines: that of the forward
            right = "const int full_end = key_end(p.visible, t, first_token) / KEYS;"
            at = text.index(right)
            text = text[:at] + right[:-1] + " + (planted == %d);" % number + text[at + len(right):]
            continue
        if text.count(right) != 1:
            sys.exit("cuda_faults: %s: its place is there %d times" % (name, text.count(right)))
        text = text.replace(right, wrong.replace("{n}", str(number)))
    number = 'const int planted = getenv("PLANTED") ? atoi(getenv("PLANTED")) : 0;'
    return text.replace("namespace {\n", "namespace {\n\n" + number + "\n", 1)


def build():
    folder = os.path.join(BUILD, "cuda_faults")
    os.makedirs(folder, exist_ok=True)
    source, program = os.path.join(folder, "planted.cu"), os.path.join(folder, "tests")
    open(source, "w").write(plant())
    flags = ["-std=c++17", "-O1"]
    subprocess.run([CXX, *flags, "-DCHUNKFLOW_CUDA_EMULATION", "-DCHUNKFLOW_NCCL", "-Itests/emulation", "-I.",
                    "-x", "c++", "-c", source, "-o", os.path.join(folder, "planted.o")], check=True)
    objects = [os.path.join(BUILD, "cuda", name) for name in os.listdir(os.path.join(BUILD, "cuda"))
               if re.search(r"\.cc\.o$", name)]
    objects.append(os.path.join(BUILD, "test", "implementation.o"))
    subprocess.run([CXX, *flags, os.path.join(folder, "planted.o"), *sorted(objects), "-o", program], check=True)
    return program


def failures(program, number, tests):
    """The tests that fail with that fault."""
    try:
        run = subprocess.run([program, *tests.split()], capture_output=True, text=True, errors="replace",
                             env=dict(os.environ, PLANTED=str(number)), timeout=900)
    except subprocess.TimeoutExpired:
        return ["(no end) " + tests]
    return re.findall(r"FAILED (\S+?),", run.stdout) or (["(stopped) " + tests] if run.returncode else [])


def main():
    program = build()
    chosen = [(number, name, tests) for number, (name, _, _, tests) in enumerate(FAULTS, 1)
              if len(sys.argv) == 1 or any(part in name for part in sys.argv[1:])]
    unplanted = failures(program, 0, " ".join(sorted({test for _, _, tests in chosen for test in tests.split()})))
    if unplanted:
        sys.exit("cuda_faults: fails without a fault: " + ", ".join(unplanted))
    caught = 0
    for number, name, tests in chosen:
        failed = failures(program, number, tests)
        print("%-48s %s" % (name, "caught by " + ", ".join(failed) if failed else "MISSED by " + tests), flush=True)
        caught += bool(failed)
    print("%d caught, %d missed" % (caught, len(chosen) - caught))
    return caught < len(chosen)


if __name__ == "__main__":
    sys.exit(main())
