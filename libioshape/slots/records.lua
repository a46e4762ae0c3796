-- SPDX-License-Identifier: Apache-2.0
-- The data of a pool. A part of slots.lua, which includes this file.
--
--   :m  hash   `run`: run id of the server that wrote the data, '' during a write; `pool`, `set`, `limits`, and `m:ID` of
--              each holder and waiter: packed tables with named fields
--   :h  zset   ids of holders, by the end of their lease
--   :q  zset   queue: a tag of each waiter, by score; a tag begins with a number that rises, so that equals keep their order
--   :s  zset   the tags of small requests in the queue, by starts of their own
--   :l  zset   ids of waiters, by the end of their lease
--   :j  hash   packed table of each job
--   :w:CLIENT  list: ids of the client's requests that were granted while it waited

local FIRST_MS, FIRST_BYTES = 16, 16e6 -- speed of writes before the first one
local UNKNOWN_COST = 1000 -- of a request without a size, from a new job

local function new_pool()
	return {
		epoch = 0, -- of the data: rises when some may have been lost
		opened = 0, -- when the epoch began
		grace = 0, -- until then only requests that held a slot before the loss get one
		now = 0, -- latest time seen: the pool's clock never goes back
		ahead = 0, -- of the pool's clock before the server's
		process = '', -- of the server that wrote this
		lease = 0, -- of the latest request
		due = 0, -- no lease ends before
		renewed = 0, -- when the keys' expiry was last set
		tidied = 0, -- when jobs were last forgotten
		busy = 0, -- counts the times that the pool began to be used: older tags of jobs are void
		fence = 0, -- the latest
		seq = 0, -- counts requests that waited
		capacity = 0, by_job = 0, -- as the jobs ask for it (by_job: 1), or by rule
		used = 0, express_used = 0, -- slots, by weight; small requests beside the slots
		holders = 0, waiters = 0, small_waiters = 0, urgent_waiters = 0,
		shares = 0, -- of the jobs that have members, together
		virtual = 0, -- virtual time: slot-milliseconds that a job of share 1 could have had
		served = 0, -- highest floor of a request that was granted: virtual time never falls below it
		small_virtual = 0, -- virtual time of the small requests that were let past the queue
		ms = FIRST_MS, bytes = FIRST_BYTES, -- of the latest writes
		free = 0, paces = 0, -- when the pool's bandwidth is free; counts changes of rates
		grants = 0, minute = 0, this_minute = 0, last_minute = 0,
		written = 0, held = 0, waited = 0, -- bytes; times of slots, together
		targets = '', latest_target = 0 -- a byte for each group of storage targets: its writers
	}
end

-- What the operator set: 0 is nothing. `limits` counts those of single jobs and users; `changed` is the server's time.
local function new_set()
	return {capacity = 0, pool_rate = 0, job_rate = 0, small = 0, express = 0, limits = 0, changed = 0}
end

-- `finish` and `latest` are the virtual end and start of the job's latest request, `turn` is the start of the job's turn,
-- which `turn_began` then,
-- `small_finish` is the end of its latest small request among small ones, `usual` is what a request without a size costs, `ms` and `bytes` are of its latest writes, `free` and `paces` as in the pool.
local function new_job()
	return {
		busy = 0, members = 0, share = 0, finish = 0, latest = 0, turn = 0, turn_began = 0, small_finish = 0, usual = UNKNOWN_COST, ms = 0, bytes = 0,
		user = '', writes = 0, written = 0, held = 0, waited = 0, seen = 0, free = 0, paces = 0
	}
end
