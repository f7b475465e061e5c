"""Out-of-band control channel between ranks: agreement, heartbeat, and who is missing.

Problem: tensor collectives hang without a word when a rank takes another branch, dies, or is late; and ranks
must agree on small things (ports, names, the kind of the next collective) before tensors can move at all. So
every rank keeps one TCP connection to a small server thread in rank 0's process. It needs no TensorFlow and
no library, and works while TensorFlow's own channels are stuck.

From bottom to top: `frames` (authenticated messages), `payloads` (values as bytes), `rendezvous` (where the
server is), `diagnosis` (texts); rank 0's server: `gatherings` and `announcements` (pure bookkeeping),
`connection`, `loop` (sockets), `membership`, `agreement` (decisions), `server`; every rank's side: `line`,
`dialing`, `hosting` (rank 0 only), `client`, `plane`.
"""

from tfdist.control.diagnosis import RankStatus
from tfdist.control.plane import ControlPlane

__all__ = ["ControlPlane", "RankStatus"]
