"""HiPS: NetAI 2018."""
