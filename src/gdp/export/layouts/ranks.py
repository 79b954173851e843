"""Ranks of torchrun: the GPUs of each host in the order of ranks, and the command that starts them."""

from collections.abc import Sequence
from dataclasses import dataclass

from gdp.export.export_target import is_cpu
from gdp.simulator.problem import Problem


def host_of(device: str) -> str:
    """Returns `host0` of `host0.gpu1`, "" of `gpu1`."""
    return device.rpartition(".")[0]


@dataclass(frozen=True)
class RankOrder:
    """The GPUs [H][] of each host, by their numbers there, in the order of ranks; H hosts."""

    gpus: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: Problem, devices: Sequence[int]) -> "RankOrder | None":
        """Returns the ranks on `devices`; None if those of a host are not neighbours, or hosts have unlike numbers."""
        names = [device.name for device in problem.cluster.devices]
        local: dict[int, int] = {}
        count: dict[str, int] = {}
        for number, is_host in enumerate(is_cpu(problem).tolist()):
            if not is_host:
                host = host_of(names[number])
                local[number] = count[host] = count.get(host, -1) + 1
        runs: dict[str, list[int]] = {}
        last = None
        for device in devices:
            host = host_of(names[device])
            if host != last and host in runs:
                return None
            runs.setdefault(host, []).append(local[device])
            last = host
        if len({len(run) for run in runs.values()}) > 1:
            return None
        return cls(tuple(map(tuple, runs.values())))

    @property
    def visible(self) -> tuple[str, ...]:
        """[H] the values of CUDA_VISIBLE_DEVICES."""
        return tuple(",".join(map(str, gpus)) for gpus in self.gpus)

    def torchrun(self, host: str = '"$NODE_RANK"', first: str = '"$MASTER_ADDR"') -> str:
        """Returns the command without a script; `host` is the number of the one it runs on, `first` host 0."""
        each = f"--nproc-per-node {len(self.gpus[0])}"
        if len(self.gpus) == 1:
            return f"torchrun --standalone {each}"
        return f"torchrun --nnodes {len(self.gpus)} --node-rank {host} --master-addr {first} {each}"

    def script(self, titles: Sequence[str], options: Sequence[str], program: str = "") -> str:
        """Returns a shell script that starts its arguments, with `options` behind them, on all ranks of a host."""
        if len(self.gpus) == 1:
            visible = [f"export CUDA_VISIBLE_DEVICES={self.visible[0]}"]
        else:
            cases = [f"  {host}) export CUDA_VISIBLE_DEVICES={gpus} ;;" for host, gpus in enumerate(self.visible)]
            visible = [
                ': "${NODE_RANK:?is the number of this host}" "${MASTER_ADDR:?is the address of host 0}"',
                'case "$NODE_RANK" in',
                *cases,
                "esac",
            ]
        command = " ".join(["exec", self.torchrun(), *([program] if program else []), '"$@"'])
        lines = [*(f"# {title}" for title in titles), *visible, " \\\n  ".join([command, *options])]
        return "\n".join(lines) + "\n"
