"""The pure heart of the engine: no torch, ray, triton or asyncio; the clock is an argument."""
