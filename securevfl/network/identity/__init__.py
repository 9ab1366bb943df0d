"""Who is who on the network: keys, certificates, the consortium's authority, signatures."""
