"""What a step costs and what the host did: meter (rates, stage times), ledger (launches, waits, copies), timeline."""
