"""Simple, correct implementations as a learner writes them. Tests of `check` plant mistakes in this
text by replacing a part of it."""

import torch
import torch.distributed as dist
from torch import nn


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        scale = q.shape[-1] ** -0.5
        n, m, block = q.shape[-2], k.shape[-2], 32
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], device=q.device)
        for i in range(0, n, block):
            qi = q[..., i : i + block, :].float()
            acc = torch.zeros_like(qi)
            total = qi.new_zeros(qi.shape[:-1])
            top = qi.new_full(qi.shape[:-1], -torch.inf)
            for j in range(0, m, block):
                if is_causal and j > i:
                    break
                s = qi @ k[..., j : j + block, :].float().transpose(-2, -1) * scale
                if is_causal:
                    rows = torch.arange(i, i + s.shape[-2], device=q.device)[:, None]
                    keys = torch.arange(j, j + s.shape[-1], device=q.device)[None]
                    s = s.masked_fill(keys > rows, -1e6)
                new = torch.maximum(top, s.amax(-1))
                p = torch.exp(s - new[..., None])
                kept = torch.exp(top - new)
                total = kept * total + p.sum(-1)
                acc = kept[..., None] * acc + p @ v[..., j : j + block, :].float()
                top = new
            out[..., i : i + block, :] = (acc / total[..., None]).to(q.dtype)
            lse[..., i : i + block] = top + total.log()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        dtype, scale = q.dtype, q.shape[-1] ** -0.5
        q, k, v, out, grad = (x.float() for x in (q, k, v, out, grad))
        s = q @ k.transpose(-2, -1) * scale
        if ctx.is_causal:
            s = s.masked_fill(torch.ones_like(s).triu(1).bool(), -1e6)
        p = torch.exp(s - lse[..., None])
        delta = (out * grad).sum(-1, keepdim=True)
        dv = p.transpose(-2, -1) @ grad
        ds = p * (grad @ v.transpose(-2, -1) - delta) * scale
        dq, dk = ds @ k, ds.transpose(-2, -1) @ q
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None


def rmsnorm(x, weight, eps=1e-5):
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * root * weight.float()).to(x.dtype)


class DDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.handles = []
        for p in module.parameters():
            dist.broadcast(p.data, 0)
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.reduce)
        for b in module.buffers():
            dist.broadcast(b, 0)

    def reduce(self, p):
        p.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(p.grad, async_op=True))

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


class DDPBucketed(nn.Module):
    def __init__(self, module, bucket_size_mb):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, 0)
        self.buckets, size = [[]], 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            size += p.numel() * p.element_size()
            if self.buckets[-1] and size > bucket_size_mb * 1e6:
                self.buckets.append([])
                size = p.numel() * p.element_size()
            self.buckets[-1].append(p)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        pending = []
        for bucket in self.buckets:
            grads = [p.grad for p in bucket if p.grad is not None]
            if grads:
                flat = torch.cat([g.flatten() for g in grads])
                work = dist.all_reduce(flat, async_op=True)
                pending.append((work, flat, grads))
        for work, flat, grads in pending:
            work.wait()
            flat /= dist.get_world_size()
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))


class ShardedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **options):
        self.cls, self.inner, self.owner = optimizer_cls, None, {}
        super().__init__(params, options)

    def add_param_group(self, group):
        super().add_param_group(group)
        group = self.param_groups[-1]
        for p in group["params"]:
            self.owner[p] = len(self.owner) % dist.get_world_size()
        mine = [p for p in group["params"] if self.owner[p] == dist.get_rank()]
        if not mine:
            return
        own = {**group, "params": mine}
        if self.inner is None:
            self.inner = self.cls([own])
        else:
            self.inner.add_param_group(own)

    def step(self, *_):
        if self.inner is not None:
            for own, group in zip(self.inner.param_groups, self.param_groups, strict=False):
                own["lr"] = group["lr"]
            self.inner.step()
        for p, rank in self.owner.items():
            dist.broadcast(p.data, rank)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(_, shard, dtype):
        own = shard.to(dtype or shard.dtype).contiguous()
        full = own.new_empty(own.shape[0] * dist.get_world_size(), *own.shape[1:])
        dist.all_gather_into_tensor(full, own)
        return full

    @staticmethod
    def backward(_, grad):
        size = dist.get_world_size()
        own = torch.empty_like(grad.chunk(size)[0])
        dist.reduce_scatter_tensor(own, grad.contiguous())
        return own.float() / size, None


class FSDP(nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.dtype, self.shards, known = module, compute_dtype, {}, {}
        self.names = {p: name for name, p in module.named_parameters()}
        for m in module.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                full = m.weight
                if full not in known:
                    mine = full.data.chunk(dist.get_world_size())[dist.get_rank()].clone()
                    known[full] = nn.Parameter(mine, requires_grad=full.requires_grad)
                    self.shards[self.names[full]] = known[full]
                del m._parameters["weight"]
                m.shard = known[full]
                m.register_forward_pre_hook(self.gather)

    def gather(self, m, _):
        m.weight = Gather.apply(m.shard, self.dtype)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        for p in self.parameters():
            if p in self.names and p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    def gather_full_params(self):
        full = {name: p.data for p, name in self.names.items()}
        return full | {name: Gather.apply(p.data, None) for name, p in self.shards.items()}
