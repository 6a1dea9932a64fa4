"""Several ranks: config (ga.Distributed and the collectives), reducer (what a rank does in a step), early (gradients of compiled backwards),
p2p (all-reduce by peer-to-peer copies), zero1 (sharded optimizer state), rendezvous, spawn (ga.launch), trace (what was sent, and when)."""
