-- SPDX-License-Identifier: Apache-2.0
-- The rules by which writers take turns, as Redis runs them. docs/slots.md says them in words; rules.c
-- does the same for one host. All times are milliseconds, all costs slot-milliseconds.
--
-- KEYS[1]      {ios:POOL}:m; the others are beside it, under the same tag
-- ARGV[1]      the operation; the rest is said at each function of `operations`
--
--   :m  hash   the pool: counters, clock, what the operator set
--   :d  hash   who holds or waits, by id (packed)
--   :h  zset   ids of holders, by the end of their lease
--   :q  zset   waiters by start tag; the member begins with a number that rises, for those alike
--   :s  zset   the small ones among them, by start tag and age
--   :l  zset   ids of waiters, by when they are taken for dead
--   :j  hash   where each job's next request begins (packed)
--   :p  hash   when each job's bandwidth is free again
--   :w:CLIENT  list: ids of that client's requests that were granted while it waited

local MOST_REAPED = 16 -- dead holders, and as many waiters, per call
local MOST_GRANTED = 32 -- per call
local LISTED = 256 -- members in a status
local KEPT = 24 * 3600 * 1000 -- an abandoned pool is forgotten after so long
local OPERATORS_LEASE = 15000 -- what an operator's command takes the leases to be
local GAP = 100 -- silence after which we look whether the server is still the same
local SMALL_BYTES = 16 * 1024 * 1024
local EXPRESS = 1
local AGEING = 1 / 64 -- of each grant's cost passes in virtual time at least
local LEARNING = 1 / 8 -- weight of the latest write in what is known of the storage's speed
local FIRST_MS_PER_BYTE = 1e-6
local UNKNOWN_COST = 1000 -- of a request that says no size, from a job not seen before
local PACE_MS = 250 -- a grant of bandwidth lasts about so long

local prefix = string.sub(KEYS[1], 1, -2)
local M, D, H, Q = KEYS[1], prefix .. 'd', prefix .. 'h', prefix .. 'q'
local S, L, J, P = prefix .. 's', prefix .. 'l', prefix .. 'j', prefix .. 'p'

local call = redis.call

-- Numbers as text: Lua's own way loses digits above 10^14.
local function whole(number)
	return string.format('%.0f', number)
end

local function exact(number)
	return string.format('%.17g', number)
end

local function server_ms()
	local time = call('TIME')
	return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- ---- The pool's numbers ---------------------------------------------------------------------------

-- Those of :m that are numbers, in the order in which they are read.
local FIELDS = {
	'epoch', -- of the data: changes when some may have been lost
	'hw', -- the latest time seen: ours never goes back
	'fence', -- the last one given
	'vt', -- virtual time: the start tag of the last grant
	'used', -- slots, by weight
	'express_used',
	'holders', 'waiters', -- how many
	'seq', -- of requests that waited
	'cap', -- capacity, as the jobs ask for it
	'by', -- 1: a job asked; 0: the default
	'grace', -- until then only those are let in that held a slot before the data was lost
	'reclaim', -- until then they may
	'busy', -- counts the times that the pool began to be used: older tags of jobs are forgotten
	'speed', -- ms per byte of a slot
	'free', -- when the pool's bandwidth is free again
	'grants',
	'minute', 'this_minute', 'last_minute', -- grants in them
	'renewed', -- when the keys' expiry was last set
	'set_capacity', 'set_pool_rate', 'set_job_rate', 'set_small', 'set_express' -- by the operator
}

local pool, before, now = {}, {}, nil

local function load_pool()
	local values = call('HMGET', M, 'run', unpack(FIELDS))
	for i, field in ipairs(FIELDS) do
		pool[field] = tonumber(values[i + 1] or '0')
		before[field] = pool[field]
	end
	return values[1]
end

local function store_pool()
	local changed = {}
	for _, field in ipairs(FIELDS) do
		if pool[field] ~= before[field] then
			changed[#changed + 1] = field
			changed[#changed + 1] = exact(pool[field])
		end
	end
	if #changed > 0 then
		call('HSET', M, unpack(changed))
	end
end

local function was_set()
	return pool.set_capacity + pool.set_pool_rate + pool.set_job_rate + pool.set_small
		+ pool.set_express > 0
end

local function keep(...)
	for _, key in ipairs({...}) do
		call('PEXPIRE', key, KEPT)
	end
end

-- What the operator set is kept until he clears it.
local function keep_all()
	pool.renewed = now
	keep(D, H, Q, S, L, J, P)
	if not was_set() then
		keep(M)
	end
end

local function capacity()
	return pool.set_capacity > 0 and pool.set_capacity or pool.cap
end

local function small_bytes()
	return pool.set_small > 0 and pool.set_small or SMALL_BYTES
end

local function express()
	return pool.set_express > 0 and pool.set_express or EXPRESS
end

-- ---- Lost data --------------------------------------------------------------------------------------

-- Keys can vanish one by one, where the server is told to evict them. What is left is then worth nothing.
local function wipe()
	call('DEL', D, H, Q, S, L, J)
	pool.used, pool.express_used, pool.holders, pool.waiters = 0, 0, 0, 0
end

-- A new epoch begins when the data is not there, or is what another server process, before a crash or
-- a failover, had on its disk or had been sent. Whoever held a slot shows up within a beat, and is let
-- in first.
local function open_epoch(run, known_epoch, lease, started)
	local lost_now = known_epoch > 0
	if run then
		lost_now = now - pool.hw < lease or pool.holders > 0
	end
	pool.epoch = math.max(pool.epoch + 1, now)
	pool.reclaim = now + lease
	pool.grace = lost_now and now + math.ceil(lease / 2) or started + math.ceil(lease / 2)
	if not run then
		pool.speed = FIRST_MS_PER_BYTE
		-- The rest must not outlive its counters.
		wipe()
	end
end

local function look_at_server(run, known_epoch, lease)
	if run == 'broken' then
		wipe()
	elseif run and now - pool.hw < GAP then
		return
	end
	local info = call('INFO', 'server')
	local current = string.match(info, 'run_id:(%w+)')
	if run == current then
		return
	end
	local uptime = tonumber(string.match(info, 'uptime_in_seconds:(%d+)')) * 1000
	open_epoch(run, known_epoch, lease, now - uptime)
	call('HSET', M, 'run', current)
	if not run then
		keep(M)
	end
end

-- ---- Members ----------------------------------------------------------------------------------------

-- A member is a list; these are its places.
local NODE, JOB, RANK, SHARE, WEIGHT, BYTES, CLIENT, LEASE = 1, 2, 3, 4, 5, 6, 7, 8
local STATE, COST, START, SINCE, PASSED, FENCE, TAG, GIVEN = 9, 10, 11, 12, 13, 14, 15, 16
local WAITING, HOLDING = 1, 2

local function load_member(id)
	local packed = call('HGET', D, id)
	return packed and cmsgpack.unpack(packed)
end

-- For an id that stands in one of the sets.
local function must_load_member(id)
	local member = load_member(id)
	if not member then
		call('HSET', M, 'run', 'broken')
		error('IOSHAPE-ANEW') -- the client asks again, and finds a new epoch
	end
	return member
end

local function store_member(id, member)
	call('HSET', D, id, cmsgpack.pack(member))
end

local function describe(member)
	return 'job ' .. member[JOB] .. ', rank ' .. member[RANK] .. ' on ' .. member[NODE]
end

-- ---- Jobs -------------------------------------------------------------------------------------------

-- A job: {busy, finish, usual, latest}: in which busy time of the pool it was seen, where its next request
-- begins, what its requests usually cost, where the latest one began.
local function load_job(name)
	local packed = call('HGET', J, name)
	local job = packed and cmsgpack.unpack(packed) or {0, 0, UNKNOWN_COST, 0}
	if job[1] ~= pool.busy then
		job[1], job[2], job[4] = pool.busy, 0, 0
	end
	return job
end

local function store_job(name, job)
	call('HSET', J, name, cmsgpack.pack(job))
end

-- ---- Coming and going -------------------------------------------------------------------------------

local function forget_waiter(id, member)
	call('ZREM', Q, member[TAG])
	call('ZREM', L, id)
	if member[BYTES] > 0 then
		call('ZREM', S, id)
	end
	pool.waiters = pool.waiters - 1
end

local function forget_holder(id, member)
	call('ZREM', H, id)
	pool.holders = pool.holders - 1
	pool.used = pool.used - member[GIVEN]
	if member[GIVEN] == 0 then
		pool.express_used = pool.express_used - 1
	end
end

local function forget(id, member)
	if member[STATE] == HOLDING then
		forget_holder(id, member)
	else
		forget_waiter(id, member)
	end
	call('HDEL', D, id)
end

local function admit(id, member, given, lease)
	pool.fence = math.max(pool.fence + 1, now * 1024)
	pool.grants = pool.grants + 1
	pool.this_minute = pool.this_minute + 1
	member[STATE], member[FENCE], member[SINCE], member[GIVEN] = HOLDING, pool.fence, now, given
	call('ZADD', H, now + lease, id)
	if pool.holders == 0 then
		keep(H)
	end
	pool.holders = pool.holders + 1
	pool.used = pool.used + given
	if given == 0 then
		pool.express_used = pool.express_used + 1
	else
		pool.vt = math.max(pool.vt, member[START]) + member[COST] / member[SHARE] * AGEING
	end
	store_member(id, member)
end

-- A slot for who waits. It has a third of its lease to show that it knows.
local function grant(id, member, given)
	forget_waiter(id, member)
	admit(id, member, given, math.ceil(member[LEASE] / 3))
	local wake = prefix .. 'w:' .. member[CLIENT]
	call('RPUSH', wake, id)
	call('PEXPIRE', wake, member[LEASE])
end

-- More than there is may come in when it is alone.
local function fits(weight)
	return pool.used == 0 or pool.used + weight <= capacity()
end

local function grant_those_that_fit()
	local granted = 0
	while pool.waiters > 0 and granted < MOST_GRANTED do
		local id = string.sub(call('ZRANGE', Q, 0, 0)[1], 17)
		local member = must_load_member(id)
		if not fits(member[WEIGHT]) then
			break
		end
		grant(id, member, member[WEIGHT])
		granted = granted + 1
	end
	while pool.waiters > 0 and pool.express_used < express() and granted < MOST_GRANTED do
		local id = call('ZRANGE', S, 0, 0)[1]
		if not id then
			break
		end
		grant(id, must_load_member(id), 0)
		granted = granted + 1
	end
end

local function reap(zset)
	for _, id in ipairs(call('ZRANGEBYSCORE', zset, '-inf', now, 'LIMIT', 0, MOST_REAPED)) do
		forget(id, must_load_member(id))
	end
end

-- What every operation begins with.
local function tick(known_epoch, lease)
	local run = load_pool()
	now = math.max(server_ms(), pool.hw)
	look_at_server(run, known_epoch, lease)
	pool.hw = now
	local minute = math.floor(now / 60000)
	if minute ~= pool.minute then
		pool.last_minute = minute == pool.minute + 1 and pool.this_minute or 0
		pool.this_minute, pool.minute = 0, minute
	end
	if pool.holders > 0 then
		reap(H)
	end
	if pool.waiters > 0 then
		reap(L)
	end
	if now >= pool.grace then
		grant_those_that_fit()
	end
	if now - pool.renewed > KEPT / 4 then
		keep_all()
	end
end

-- ---- Answers ----------------------------------------------------------------------------------------

local function paced()
	return pool.set_pool_rate + pool.set_job_rate > 0 and 1 or 0
end

-- {state, fence, epoch, weight, position, capacity, next beat, paced, ahead}
local function nobody()
	return {0, '0', whole(pool.epoch), 0, 0, capacity(), 0, paced(), ''}
end

local function holder(member)
	return {
		HOLDING, whole(member[FENCE]), whole(pool.epoch), member[GIVEN], 0, capacity(),
		math.ceil(member[LEASE] / 3), paced(), ''
	}
end

local function waiter(member)
	local position = call('ZRANK', Q, member[TAG])
	local beat, ahead, id = math.ceil(member[LEASE] / 3), '', nil
	if position > 0 then
		id = string.sub(call('ZRANGE', Q, position - 1, position - 1)[1], 17)
	else
		-- The next one looks whether who holds a slot is still alive.
		local first = call('ZRANGE', H, 0, 0, 'WITHSCORES')
		id = first[1]
		local change = math.max(tonumber(first[2] or 0), pool.grace) - now
		beat = math.max(1, math.min(beat, change))
	end
	if id then
		ahead = describe(must_load_member(id))
	end
	return {WAITING, '0', whole(pool.epoch), 0, position, capacity(), beat, paced(), ahead}
end

-- ---- Operations -------------------------------------------------------------------------------------

local operations = {}

local function cost_of(bytes, weight, job)
	local time = bytes > 0 and 1 + bytes * pool.speed or job[3]
	return time * weight
end

local function enqueue(id, member)
	pool.seq = pool.seq + 1
	member[STATE], member[SINCE] = WAITING, now
	member[TAG] = string.format('%016.0f', pool.seq) .. id
	call('ZADD', Q, exact(member[START]), member[TAG])
	call('ZADD', L, now + member[LEASE], id)
	if pool.waiters == 0 then
		keep(Q, L)
	end
	if member[BYTES] > 0 and member[BYTES] <= small_bytes() and member[WEIGHT] == 1 then
		call('ZADD', S, exact(member[START] + now), id)
		keep(S)
	end
	pool.waiters = pool.waiters + 1
	store_member(id, member)
end

-- acquire id client node job rank share weight bytes lease asked-capacity default-capacity known-epoch
-- never-wait
function operations.acquire(id, client, node, job_name, rank, share, weight, bytes, lease, asked, usual,
		known_epoch, never_wait)
	share, weight, bytes, lease = tonumber(share), tonumber(weight), tonumber(bytes), tonumber(lease)
	tick(tonumber(known_epoch), lease)
	local member = load_member(id)
	if member then
		return member[STATE] == HOLDING and holder(member) or waiter(member)
	end
	if pool.holders + pool.waiters == 0 then
		-- Nobody is disturbed: a new busy time begins, and what jobs ask for counts.
		pool.cap = tonumber(asked) > 0 and tonumber(asked) or tonumber(usual)
		pool.by = tonumber(asked) > 0 and 1 or 0
		pool.busy = pool.busy + 1
		keep(D, J)
	end
	local at_once = now >= pool.grace and pool.waiters == 0 and fits(weight)
	if never_wait == '1' and not at_once then
		return nobody()
	end
	local job = load_job(job_name)
	local cost = cost_of(bytes, weight, job)
	-- Never before one of the same job that came earlier, whatever that was charged since.
	local start = math.max(pool.vt, job[2], job[4])
	job[2], job[4] = start + cost / share, start
	store_job(job_name, job)
	member = {node, job_name, rank, share, weight, bytes, client, lease, 0, cost, start, now, 0, 0, '', 0}
	if at_once then
		admit(id, member, weight, lease)
		return holder(member)
	end
	enqueue(id, member)
	if now >= pool.grace then
		grant_those_that_fit()
		member = load_member(id)
	end
	return member[STATE] == HOLDING and holder(member) or waiter(member)
end

-- beat id passed lease known-epoch holding fence weight bytes client node job rank share
function operations.beat(id, passed, lease, known_epoch, holding, fence, weight, bytes, client, node,
		job_name, rank, share)
	lease, known_epoch, passed = tonumber(lease), tonumber(known_epoch), tonumber(passed)
	tick(known_epoch, lease)
	local member = load_member(id)
	if not member then
		-- It held a slot when the data was lost, and is the one that still does.
		if holding == '0' or known_epoch == pool.epoch or now >= pool.reclaim then
			return nobody()
		end
		local given = tonumber(weight)
		member = {
			node, job_name, rank, tonumber(share), given, tonumber(bytes), client, lease, HOLDING, 0,
			pool.vt, now, passed, tonumber(fence), '', given
		}
		if pool.holders == 0 then
			keep(D, H)
		end
		pool.fence = math.max(pool.fence, tonumber(fence))
		pool.holders = pool.holders + 1
		pool.used = pool.used + given
		pool.express_used = pool.express_used + (given == 0 and 1 or 0)
		call('ZADD', H, now + lease, id)
		store_member(id, member)
		return holder(member)
	end
	if member[STATE] == HOLDING then
		call('ZADD', H, now + lease, id)
		if member[PASSED] ~= passed then
			member[PASSED] = passed
			store_member(id, member)
		end
		return holder(member)
	end
	call('ZADD', L, now + lease, id)
	return waiter(member)
end

-- What a slot was really used for, instead of what was expected: learnt, and charged to the job.
local function settle(member, passed)
	local time = now - member[SINCE]
	local job = load_job(member[JOB])
	local cost = time * member[WEIGHT]
	if passed >= 1024 * 1024 and time > 0 then
		pool.speed = pool.speed + (time / passed - pool.speed) * LEARNING
	end
	job[2] = math.max(job[2] + (cost - member[COST]) / member[SHARE], 0)
	job[3] = job[3] + (math.max(cost / member[WEIGHT], 1) - job[3]) * LEARNING
	store_job(member[JOB], job)
end

-- release id passed lease known-epoch
function operations.release(id, passed, lease, known_epoch)
	tick(tonumber(known_epoch), tonumber(lease))
	local member = load_member(id)
	if not member then
		return 0
	end
	-- First what takes no memory: a server that has none left would refuse the rest.
	forget(id, member)
	if member[STATE] == HOLDING and member[COST] > 0 then
		settle(member, tonumber(passed))
	end
	if now >= pool.grace then
		grant_those_that_fit()
	end
	return 1
end

-- pace job bytes job-rate lease known-epoch: {bytes, start, end}
function operations.pace(job_name, bytes, job_rate, lease, known_epoch)
	tick(tonumber(known_epoch), tonumber(lease))
	bytes, job_rate = tonumber(bytes), tonumber(job_rate)
	if job_rate == 0 or (pool.set_job_rate > 0 and pool.set_job_rate < job_rate) then
		job_rate = pool.set_job_rate
	end
	local pool_rate = pool.set_pool_rate
	if job_rate == 0 and pool_rate == 0 then
		return {0, 0, 10000}
	end
	local rate = math.min(job_rate > 0 and job_rate or pool_rate, pool_rate > 0 and pool_rate or job_rate)
	local job_free = job_rate > 0 and tonumber(call('HGET', P, job_name) or '0') or 0
	local start = now
	if bytes > 0 then
		bytes = math.max(bytes, math.floor(rate * PACE_MS / 1000))
		start = math.max(now, pool_rate > 0 and pool.free or 0, job_free)
	end
	-- What comes back was the last that was given, unless others came after it: nobody loses.
	if pool_rate > 0 then
		pool.free = (bytes > 0 and start or pool.free) + bytes * 1000 / pool_rate
	end
	if job_rate > 0 then
		call('HSET', P, job_name, exact((bytes > 0 and start or job_free) + bytes * 1000 / job_rate))
		keep(P)
	end
	if bytes <= 0 then
		return {0, 0, 0}
	end
	return {whole(bytes), math.floor(start - now), math.ceil(start - now + bytes * 1000 / rate)}
end

-- set clear capacity pool-rate job-rate small express (0: as it was)
function operations.set(clear, ...)
	tick(0, OPERATORS_LEASE)
	local names = {'set_capacity', 'set_pool_rate', 'set_job_rate', 'set_small', 'set_express'}
	for i, value in ipairs({...}) do
		if clear == '1' or tonumber(value) > 0 then
			pool[names[i]] = tonumber(value)
		end
	end
	if was_set() then
		call('PERSIST', M)
	else
		keep(M)
	end
	if now >= pool.grace then
		grant_those_that_fit()
	end
	return 1
end

-- kick id
function operations.kick(id)
	tick(0, OPERATORS_LEASE)
	local member = load_member(id)
	if not member then
		return 0
	end
	forget(id, member)
	if now >= pool.grace then
		grant_those_that_fit()
	end
	return 1
end

local function row(id, member, deadline)
	return {
		id, member[JOB], member[NODE], member[RANK], member[WEIGHT],
		member[STATE] == HOLDING and member[GIVEN] == 0 and 1 or 0, whole(member[BYTES]),
		whole(member[PASSED]), whole(member[FENCE]), whole(now - member[SINCE]),
		whole(tonumber(deadline or '0') - now)
	}
end

-- status: {{numbers}, {holders}, {waiters}}
function operations.status()
	tick(0, OPERATORS_LEASE)
	local holders, waiters = {}, {}
	local held = call('ZRANGE', H, 0, LISTED - 1, 'WITHSCORES')
	for i = 1, #held, 2 do
		holders[#holders + 1] = row(held[i], must_load_member(held[i]), held[i + 1])
	end
	for _, tag in ipairs(call('ZRANGE', Q, 0, LISTED - 1)) do
		local id = string.sub(tag, 17)
		waiters[#waiters + 1] = row(id, must_load_member(id), call('ZSCORE', L, id))
	end
	local by = pool.set_capacity > 0 and 2 or pool.by
	return {
		{
			capacity(), by, pool.used, whole(pool.set_pool_rate), whole(pool.set_job_rate),
			whole(small_bytes()), express(), whole(pool.grants), pool.last_minute, pool.waiters
		}, holders, waiters
	}
end

local answer = operations[ARGV[1]](unpack(ARGV, 2))
store_pool()
return answer
