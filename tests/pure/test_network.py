"""What the network counted, on a made-up tree of /proc and /sys: no process group."""

from pathlib import Path

import pytest
import torch

from common import network
from common.groups import Job

SNMP = """\
Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm OutSegs RetransSegs InErrs
Tcp: 1 46116275 {} 0
"""
NETSTAT = """\
TcpExt: SyncookiesSent TCPDSACKRecv
TcpExt: 0 10
IpExt: InNoRoutes
IpExt: 0
"""
DEV = """\
Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo
    lo: 7880 45 9 9 0 0 0 0 7880 45 9 9 0
  eth0:2690 54 1 {} 0 0 0 3 2568 36 0 4 0
"""
CPU = Job(0, 0, 4, 2, torch.device("cpu"), "gloo", torch.distributed.HashStore())


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text))


def machine(root: Path, out_of_sequence: int = 0, retransmitted: int = 0, drops: int = 0) -> Path:
    """A machine with one port of RoCE, whose counters stand at these numbers."""
    port = root / "sys/class/infiniband/mlx5_3/ports/1"
    write(port / "hw_counters/out_of_sequence", out_of_sequence)
    write(port / "hw_counters/np_cnp_sent", 5)
    write(port / "hw_counters/lifespan", 10)  # no count of errors
    write(port / "hw_counters/resp_cqe_flush_error", out_of_sequence)  # of connections closed
    write(port / "hw_counters/roce_slow_restart_cnps", "N/A")
    write(port / "counters/port_rcv_errors", 7)
    write(port / "counters/port_xmit_data", out_of_sequence * 1000)
    write(root / "proc/net/snmp", SNMP.format(retransmitted))
    write(root / "proc/net/netstat", NETSTAT)
    write(root / "proc/net/dev", DEV.format(drops))
    return root


def test_what_is_read_are_counts_of_errors(tmp_path: Path) -> None:
    assert network.read(machine(tmp_path, 3, 12, 2)) == {
        "mlx5_3/1 out_of_sequence": 3,
        "mlx5_3/1 np_cnp_sent": 5,
        "mlx5_3/1 port_rcv_errors": 7,
        "RetransSegs": 12,
        "TCPDSACKRecv": 10,
        "eth0 rx_errors": 1,
        "eth0 rx_drops": 2,
        "eth0 tx_errors": 0,
        "eth0 tx_drops": 4,
    }
    assert network.read(tmp_path / "a system without them") == {}


def test_a_node_that_sent_again_is_named(tmp_path: Path) -> None:
    """Only what grew counts, the largest first. Nothing is printed where nothing grew."""
    before = network.read(machine(tmp_path, 100, 12, 1))
    grew = network.growth(before, network.read(machine(tmp_path, 1304, 15, 1)))
    assert list(grew.items()) == [("mlx5_3/1 out_of_sequence", 1204), ("RetransSegs", 3)]
    assert network.lines_of(["node1", "node2"], [{}, grew]) == [
        "warning: node2 counted during the run: 1,204 mlx5_3/1 out_of_sequence, 3 RetransSegs"
    ]
    assert network.growth(before, before) == {}
    assert network.lines_of(["node1", "node2"], [{}, {}]) == []


def test_a_counter_that_was_reset_counts_from_0_and_a_new_one_from_where_it_is() -> None:
    assert network.growth({"a": 1000}, {"a": 4, "b": 50}) == {"a": 4}


def test_a_segment_that_came_twice_was_not_lost() -> None:
    """As on a busy machine that loses nothing: all segments that were sent again came twice."""
    assert network.serious({"RetransSegs": 7, "TCPDSACKRecv": 7, "eth0 rx_drops": 1}) == {
        "eth0 rx_drops": 1
    }
    assert network.serious({"RetransSegs": 1777, "TCPDSACKRecv": 4}) == {
        "TCP segments sent again": 1773
    }
    assert network.serious({"TCPDSACKRecv": 1}) == {}  # of one that was sent before the run


def test_the_worst_nodes_come_first_and_the_lines_are_bounded() -> None:
    hosts = [f"node{number}" for number in range(20)]
    lines = network.lines_of(hosts, [{"eth0 rx_drops": number} for number in range(1, 21)])
    assert lines[0] == "warning: node19 counted during the run: 20 eth0 rx_drops"
    assert len(lines) == 17
    assert lines[-1] == "... and 4 more nodes"


def test_the_last_lines_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has every node, and says how many counters there were. One node prints nothing."""
    monkeypatch.setattr(network, "read", lambda: {"RetransSegs": 9, "eth0 rx_drops": 0})
    before = {"RetransSegs": 2, "eth0 rx_drops": 0}
    row = {"counters": 2, "grew": {"RetransSegs": 7}}
    # two nodes of two ranks; the second rank of a node says nothing
    monkeypatch.setattr(network, "gather", lambda mine: [mine, None, mine, None])
    last_line, lines = network.at_the_end(CPU, {"hosts": ["a", "b"]}, before)
    assert last_line == {"network": [row, row]}
    assert [line.split()[1] for line in lines] == ["a", "b"]
    monkeypatch.setattr(network, "gather", lambda mine: [mine, None])
    assert network.at_the_end(CPU, {"hosts": ["a"]}, before) == ({"network": [row]}, [])
