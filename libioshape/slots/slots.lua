-- SPDX-License-Identifier: Apache-2.0
-- Who may write, as Redis decides it. docs/slots.md says the rules in words. All times are milliseconds,
-- all costs slot-milliseconds.
--
-- KEYS[1]      {ios:POOL}:vN:m, where N is the number of this format (SCRIPT_FORMAT); the others are beside it
-- ARGV         the operation; whom it is about (an id, a job or an operator); lease; the epoch that the client
--              knows; the rest is said at each operation
--
--   :m  hash   `pool`: counters, clock, what the operator set; `run`: of the server;
--              `limits`: what the operator set for one job or user; `m:ID`: who holds or waits. All but `run` packed
--   :h  zset   ids of holders, by the end of their lease
--   :q  zset   waiters in their order; the member begins with a number that rises, for those alike
--   :s  zset   the small ones among them, by start tags of their own; the same members
--   :l  zset   ids of waiters, by when they are taken for dead
--   :j  hash   what is remembered of jobs (packed)
--   :w:CLIENT  list: ids of that client's requests that were granted while it waited
--
-- Each call of Redis costs the server about a microsecond, and each function here that is made a sixth of one.
-- So a call reads the pool and its member at once and writes them at once, and what is rarely needed is made
-- where it is.

local MOST_REAPED = 16 -- dead holders, and as many waiters, per call
local MOST_GRANTED = 32 -- per call
local MOST_JOBS = 1000 -- when there are more, those that were not seen for longest are forgotten ...
local KEPT_JOBS = 500 -- ... but for so many that have nothing in the pool
local TIDIED = 60000 -- not more often than that
local LISTED_JOBS = 64 -- those that wrote most, in a status
local MOST_LIMITS = 64 -- for one job or user
local MOST_NAME = 64 -- bytes of a name in what is kept: anybody can say longer ones
local LISTED = 256 -- holders, and waiters, in a status
local NEAR = 10 -- up to this position one is told who goes before it
local KEPT = 24 * 3600 * 1000 -- an abandoned pool is forgotten after so long
local GAP = 100 -- silence after which we look more closely whether the server is still the same
local SMALL_BYTES = 16 * 1024 * 1024
local EXPRESS = 1
local URGENT = -1 -- its place in the queue: before all that have no deadline
local LEARNING = 1 / 8 -- weight of the latest write in what is known of speeds
local FIRST_MS, FIRST_BYTES = 16, 16e6 -- what the first write is taken to have had
local BELIEVED = 300 * 1000 -- at most, or eight times its job's usual time: what bytes make us expect
local UNKNOWN_COST = 1000 -- of a request that says no size, from a job not seen before
local MOST_PLACES = 64
local PACE_MS = 250 -- a grant of bandwidth lasts about so long ...
local PACE_WRITERS = 8 -- ... shared by so many writers at most
local WASTE, FAIR, FIRST = 1, 2, 3 -- orders
local ADVANCE = 300 * 1000 -- a job gets at most by what it says of itself, either way
local DOUBLE, USUAL_SHARE = 60 * 1000, 100 -- twice the share counts as if it had asked so much earlier

local operation, subject, lease, known_epoch = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local prefix = string.sub(KEYS[1], 1, -2)
local M, H, Q, S = KEYS[1], prefix .. 'h', prefix .. 'q', prefix .. 's'
local L, J = prefix .. 'l', prefix .. 'j'

local call = redis.call

local function server_ms()
	local time = call('TIME')
	return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Where this process happens to have its tables: no other has them there, nor does asking cost anything.
local function server_place()
	return tostring(redis)
end

local function server_info()
	return call('INFO', 'server')
end

-- ---- The pool's numbers ---------------------------------------------------------------------------

-- Packed as values, one after the other: names would cost twice as much. So another number is another
-- format, once this one is released. In a new pool all but few are 0.
--
--   epoch        of the data: changes when some may have been lost
--   opened       when the epoch began
--   grace        until then only those are let in that held a slot before the data was lost
--   hw           the latest time seen: ours never goes back
--   ahead        of the server's clock: where that is set back, ours goes on
--   fence        the last one given
--   vt           virtual time: slot-milliseconds that a job of share 1 could have had
--   served       the highest start tag granted: virtual time is never behind it
--   small_vt     the same, of those that were let past the queue
--   used         slots, by weight
--   express_used
--   holders, waiters: how many; small_waiters: among them, that may be let past the queue; urgent_waiters:
--   that have a deadline
--   shares       of the jobs that hold or wait, together
--   seq          of requests that waited
--   cap          capacity, as the jobs ask for it, or by rule
--   by           1: a job asked; 0: it is a rule's
--   lease        of the latest request
--   busy         counts the times that the pool began to be used: older tags of jobs are forgotten
--   ms, bytes    time and size of the latest writes
--   free         when the pool's bandwidth is free again
--   grants; and this_minute, last_minute: in them; minute: which one this is
--   tidied       when jobs were last forgotten
--   renewed      when the keys' expiry was last set
--   due          no lease ends before
--   paces        counts the times that bandwidth given in advance was forgotten
--   written, held, waited: bytes that were written in its slots, and milliseconds that these were held and
--   waited for
--   limits       for one job or user: how many
--   place        of the server process that wrote this
--   base         of places in the queue: above those in the order before
--   places       a byte for each part of the storage targets: writers that have slots there; turn: the latest
--   set_capacity, set_pool_rate, set_job_rate, set_small, set_express, set_order: by the operator
--   changed      when the operator last set something, by the server's clock

-- A key of the pool could not be read: any client may write to them. Only what operators set is kept, as far as it can
-- be read; the rest begins anew, as after a loss of all data. Returns the packed pool; false: it cannot be read.
local function drop_what_is_broken()
	local function is_hash(key)
		return type(redis.pcall('HLEN', key)) == 'number'
	end
	local function unpacked(packed)
		local found = {pcall(cmsgpack.unpack, packed)}
		return packed and table.remove(found, 1) and found
	end
	if not is_hash(M) then
		call('DEL', M)
	end
	local all, found = call('HGETALL', M), {}
	for i = 1, #all, 2 do
		local name, value = all[i], unpacked(all[i + 1])
		if string.sub(name, 1, 2) == 'm:' and value and type(value[4]) == 'string' then
			call('DEL', prefix .. 'w:' .. value[4]) -- which may be of another kind
		end
		found[name] = value and {packed = all[i + 1], values = value} or nil
	end
	call('DEL', M)
	local limits, count = {}, 0
	for key, limit in pairs(found.limits and type(found.limits.values[1]) == 'table' and found.limits.values[1] or {}) do
		local share, rate = type(limit) == 'table' and tonumber(limit.share), type(limit) == 'table' and tonumber(limit.rate)
		if share and rate and count < MOST_LIMITS and string.match(key, '^%a+:') then
			limits[key], count = {share = share, rate = rate, free = 0}, count + 1
		end
	end
	call('HSET', M, 'limits', cmsgpack.pack(limits))
	return found.pool and found.pool.packed or false, count
end

-- A waiter's beat tells its number in the queue: then nothing has to be known of it.
local ticket = operation == 'beat' and ARGV[5] ~= '0' and ARGV[5]
local stored, kept_limits
if operation == 'heal' then
	stored = {false}
	stored[2], kept_limits = drop_what_is_broken()
else
	stored = call('HMGET', M, 'run', 'pool', ticket and '' or 'm:' .. subject)
end
local run, is_known = stored[1], stored[2]
local function new_pool()
	return setmetatable({place = '', places = '', ms = FIRST_MS, bytes = FIRST_BYTES}, {__index = function()
		return 0
	end})
end
local pool
if is_known then
	local epoch, opened, grace, hw, ahead, place, lease, due, renewed, tidied, busy, cap, by,
		used, express_used, holders, waiters, small_waiters, urgent_waiters, shares, vt, served,
		small_vt, fence, seq, ms, bytes, free, paces, grants, minute, this_minute, last_minute,
		set_capacity, set_pool_rate, set_job_rate, set_small, set_express, written, held, waited, limits,
		base, set_order, places, turn, changed =
		cmsgpack.unpack(stored[2])
	pool = {
		epoch = epoch, opened = opened, grace = grace, hw = hw, ahead = ahead, place = place,
		lease = lease, due = due, renewed = renewed, tidied = tidied, busy = busy, cap = cap,
		by = by, used = used, express_used = express_used, holders = holders, waiters = waiters,
		small_waiters = small_waiters, urgent_waiters = urgent_waiters, shares = shares,
		vt = vt, served = served, small_vt = small_vt, fence = fence, seq = seq, ms = ms,
		bytes = bytes, free = free, paces = paces, grants = grants, minute = minute,
		this_minute = this_minute, last_minute = last_minute, set_capacity = set_capacity,
		set_pool_rate = set_pool_rate, set_job_rate = set_job_rate, set_small = set_small,
		set_express = set_express, written = written, held = held, waited = waited, limits = limits,
		base = base, set_order = set_order, places = places, turn = turn,
		changed = changed
	}
else
	pool = new_pool()
end
if kept_limits then
	local before = pool
	pool = new_pool()
	for name, most in pairs({
		set_capacity = 65536, set_pool_rate = 2 ^ 53, set_job_rate = 2 ^ 53, set_small = 2 ^ 53,
		set_express = 65536, set_order = FIRST, changed = 2 ^ 53
	}) do
		local value = before[name]
		pool[name] = type(value) == 'number' and value > 0 and value <= most and value or 0
	end
	pool.limits, is_known = kept_limits, false
end

-- Its clock: fences, epochs and records are made of it, so that they rise if all else is lost.
local server = server_ms()
-- The pool's clock: all else.
local now = math.max(server + pool.ahead, pool.hw)
local is_changed = now ~= pool.hw or now - server ~= pool.ahead -- the pool, so that it is to be written

local function capacity()
	return math.max(pool.set_capacity > 0 and pool.set_capacity or pool.cap, 1)
end

local function order()
	return pool.set_order > 0 and pool.set_order or WASTE
end

-- The client asks again, and finds a new epoch. (Takes no memory, so that it always can be done.)
local function start_anew()
	call('HDEL', M, 'run')
	error('IOSHAPE-ANEW')
end

-- ---- Members ----------------------------------------------------------------------------------------

local WAITING, HOLDING = 1, 2

local function unpack_member(packed)
	local job, node, rank, client, share, weight, bytes, lease, cost, start, small_start, urgent,
		tag, state, since, given, fence, passed, waited, places, place =
		cmsgpack.unpack(packed)
	return {
		job = job, node = node, rank = rank, client = client, share = share, weight = weight,
		bytes = bytes, lease = lease, cost = cost, start = start, small_start = small_start,
		urgent = urgent, tag = tag, state = state, since = since, given = given, fence = fence,
		passed = passed, waited = waited, places = places, place = place
	}
end

-- By id: those that this call has seen (false: there is none), and those that it has to write.
local members, to_write = {}, {}
if not ticket then
	members[subject] = stored[3] and unpack_member(stored[3])
end

local function find_member(id)
	if members[id] == nil then
		local packed = call('HGET', M, 'm:' .. id)
		members[id] = packed and unpack_member(packed)
	end
	return members[id]
end

-- For an id that stands in one of the sets.
local function must_find(id)
	return find_member(id) or start_anew()
end

-- It holds, or waits, until its lease is over.
local function lease_until(key, id, deadline)
	call('ZADD', key, deadline, id)
	if deadline < pool.due then
		pool.due, is_changed = deadline, true
	end
end

-- ---- Jobs -------------------------------------------------------------------------------------------

-- What is remembered of a job. `members` it has in the pool, with its `share`, in the pool's busy time
-- number `busy`; its next request begins at `finish`, the latest one did at `latest`; `small_finish` is the
-- same among small ones; `usual` is what those without a size cost; `ms` and `bytes` are time and size of
-- its latest writes. In `writes` slots that it had it wrote `written` bytes; it `held` and `waited` for them
-- so long. It was last `seen` then. Its bandwidth is `free` again then, unless the pool has forgotten
-- that since (`paces`).
local function unpack_job(packed)
	local busy, members, share, finish, latest, small_finish, usual, ms, bytes, user, writes,
		written, held, waited, seen, free, paces =
		cmsgpack.unpack(packed)
	return {
		busy = busy, members = members, share = share, finish = finish, latest = latest,
		small_finish = small_finish, usual = usual, ms = ms, bytes = bytes, user = user,
		writes = writes, written = written, held = held, waited = waited, seen = seen,
		free = free, paces = paces
	}
end

local function load_job(name)
	local packed = call('HGET', J, name)
	local job = packed and unpack_job(packed)
	if not job then
		if now - pool.tidied > TIDIED and call('HLEN', J) >= MOST_JOBS then
			local all, absent = call('HGETALL', J), {}
			pool.tidied = now
			for i = 1, #all, 2 do
				local job = unpack_job(all[i + 1])
				if job.busy ~= pool.busy or job.members == 0 then
					absent[#absent + 1] = {name = all[i], seen = job.seen or 0}
				end
			end
			table.sort(absent, function(a, b)
				return a.seen < b.seen or (a.seen == b.seen and a.name < b.name)
			end)
			for i = 1, #absent - KEPT_JOBS do
				call('HDEL', J, absent[i].name)
			end
		end
		job = {
			busy = 0, members = 0, share = 0, finish = 0, latest = 0, small_finish = 0,
			usual = UNKNOWN_COST, ms = 0, bytes = 0, user = '', writes = 0, written = 0,
			held = 0, waited = 0, seen = 0, free = 0, paces = 0
		}
	end
	if job.busy ~= pool.busy then
		job.busy, job.members = pool.busy, 0
		job.finish, job.latest, job.small_finish = 0, 0, 0
	end
	return job
end

local function store_job(name, job)
	local packed = cmsgpack.pack(
		job.busy, job.members, job.share, job.finish, job.latest, job.small_finish, job.usual,
		job.ms, job.bytes, job.user, job.writes, job.written, job.held, job.waited, job.seen,
		job.free, job.paces)
	if call('HSET', J, name, packed) == 1 then
		call('PEXPIRE', J, KEPT)
	end
end

local function join(job, share)
	if job.members == 0 then
		job.share = share
		pool.shares = pool.shares + share
	end
	job.members = job.members + 1
end

-- What a slot was really used for, instead of what was expected. `passed` if it is the holder that says
-- so: then something is to be learnt, too.
local function settle(job, member, passed)
	local time = now - member.since
	local more = time * member.weight - member.cost
	job.finish = math.max(job.finish + more / member.share, 0)
	if member.given > 0 then
		pool.vt = math.max(pool.vt + more / pool.shares, pool.served)
	end
	if passed then
		job.usual = job.usual + (math.max(time, 1) - job.usual) * LEARNING
	end
	if passed and passed > 0 then
		-- Sums, not a mean of speeds: a small write tells little about large ones.
		job.ms = job.ms * (1 - LEARNING) + time
		job.bytes = job.bytes * (1 - LEARNING) + passed
		pool.ms = pool.ms * (1 - LEARNING) + time
		pool.bytes = pool.bytes * (1 - LEARNING) + passed
	end
end

-- ---- Coming and going -------------------------------------------------------------------------------

-- A call that is refused a command in its middle leaves a pool half written. So it is no server's meanwhile, and the
-- next call begins anew. A lease alone does no harm; jobs and pool are written in the end.
local is_marked
local function mark(...)
	if not is_marked then
		call(...)
		is_marked = true
	end
end

-- Writers at a time are spread over parts of the storage targets, as many as have some of their own: to
-- the next part after the last, of those with the fewest writers.
local function count_place(place, more)
	local writers = string.byte(pool.places, place)
	pool.places = string.sub(pool.places, 1, place - 1)
		.. string.char(math.max(math.min(writers + more, 255), 0)) .. string.sub(pool.places, place + 1)
end

local function take_place(member)
	if #pool.places ~= member.places then -- files of another layout
		pool.places, pool.turn = string.rep('\0', member.places), 0
	end
	local least, found = 0, nil
	while not found do
		local writers = string.char(least)
		found = string.find(pool.places, writers, pool.turn + 1, true) or string.find(pool.places, writers, 1, true)
		least = least + 1
	end
	member.place, pool.turn = found, found
	count_place(found, 1)
end

local function forget_waiter(id, member)
	call('ZREM', Q, member.tag)
	call('ZREM', L, id)
	if member.small_start then
		call('ZREM', S, member.tag)
		pool.small_waiters = pool.small_waiters - 1
	end
	if member.urgent then
		pool.urgent_waiters = pool.urgent_waiters - 1
	end
	pool.waiters = pool.waiters - 1
end

-- `passed` if it is the holder that says so. What takes no memory comes first: a server that has none
-- left would refuse the rest if nothing was written before it.
local function forget(id, member, passed)
	local holds = member.state == HOLDING
	call('HDEL', M, 'm:' .. id, 'run')
	is_marked = true
	if holds then
		call('ZREM', H, id)
		pool.holders, pool.used = pool.holders - 1, pool.used - member.given
		if member.given == 0 then
			pool.express_used = pool.express_used - 1
		end
		if member.place > 0 and #pool.places == member.places then
			count_place(member.place, -1)
		end
	else
		forget_waiter(id, member)
	end
	members[id], to_write[id], is_changed = false, nil, true
	local job = load_job(member.job)
	if job.members == 0 then
		start_anew()
	end
	if not holds then
		job.finish = math.max(job.finish - member.cost / member.share, 0)
	elseif member.cost > 0 then -- it was not reclaimed
		settle(job, member, passed)
	end
	job.members, job.seen = job.members - 1, now
	if holds then
		local bytes, time = passed or member.passed, now - member.since
		job.writes, job.written = job.writes + 1, job.written + bytes
		job.held, job.waited = job.held + time, job.waited + member.waited
		pool.written, pool.held = pool.written + bytes, pool.held + time
		pool.waited = pool.waited + member.waited
	end
	store_job(member.job, job)
	if job.members == 0 then
		pool.shares = pool.shares - job.share
	end
end

local function hold(id, member, given, until_then)
	member.waited = member.state == WAITING and now - member.since or 0
	member.state, member.since, member.given = HOLDING, now, given
	lease_until(H, id, until_then)
	members[id], to_write[id], is_changed = member, member, true
	if pool.holders == 0 then
		call('PEXPIRE', H, KEPT)
	end
	pool.holders, pool.used = pool.holders + 1, pool.used + given
	if given == 0 then
		pool.express_used = pool.express_used + 1
	end
end

local function admit(id, member, given, until_then)
	local minute = math.floor(now / 60000)
	if minute ~= pool.minute then
		pool.last_minute = minute == pool.minute + 1 and pool.this_minute or 0
		pool.this_minute, pool.minute = 0, minute
	end
	pool.this_minute, pool.grants = pool.this_minute + 1, pool.grants + 1
	pool.fence = math.max(pool.fence + 1, server * 1024)
	if given > 0 then
		-- As if all who want slots were served at once, each by its share; and never behind the one
		-- that is served, so that new jobs do not pass old ones for ever.
		pool.served = math.max(pool.served, member.start)
		pool.vt = math.max(pool.vt + member.cost / pool.shares, pool.served)
	else
		pool.small_vt = math.max(pool.small_vt + member.cost / pool.shares, member.small_start)
	end
	member.fence = pool.fence
	if member.places > 1 then
		take_place(member)
	end
	hold(id, member, given, until_then)
end

-- A slot for the first in this queue. It has half of its lease to show that it knows: if the wake is lost,
-- the next beat comes after a third.
local function grant(id, member, given)
	mark('HDEL', M, 'run')
	forget_waiter(id, member)
	admit(id, member, given, now + math.ceil(member.lease / 2))
	local wake = prefix .. 'w:' .. member.client
	call('RPUSH', wake, id)
	call('PEXPIRE', wake, member.lease)
end

-- More than there is may come in when it is alone; and one with a deadline beside those that have slots.
local function fits(weight, urgent)
	return pool.used == 0 or pool.used + weight <= capacity() or (urgent and pool.used <= capacity())
end

local function express()
	return pool.set_express > 0 and pool.set_express or EXPRESS
end

local function grant_those_that_fit()
	local granted = 0
	if now < pool.grace then
		return
	end
	while pool.waiters > 0 and granted < MOST_GRANTED
		and (pool.used < capacity() or pool.urgent_waiters > 0) do
		local id = string.sub(call('ZRANGE', Q, 0, 0)[1], 17)
		local member = must_find(id)
		if not fits(member.weight, member.urgent) then
			break
		end
		grant(id, member, member.weight)
		granted = granted + 1
	end
	while pool.small_waiters > 0 and granted < MOST_GRANTED and pool.express_used < express() do
		local id = string.sub(call('ZRANGE', S, 0, 0)[1], 17)
		grant(id, must_find(id), 0)
		granted = granted + 1
	end
end

-- ---- Limits for one job or user ---------------------------------------------------------------------

local limits -- by 'job:NAME' and 'user:NAME': `share` (0: its own), `rate` (0: any); the bandwidth is `free` then

local function limit_of(kind, name)
	if pool.limits == 0 then
		return nil
	end
	limits = limits or cmsgpack.unpack(call('HGET', M, 'limits') or cmsgpack.pack({}))
	return limits[kind .. ':' .. name]
end

-- ---- What every operation begins with ---------------------------------------------------------------

if operation == 'status' and not is_known then
	-- To look must not make a pool.
	return {{tonumber(ARGV[5]), 0, 0, 0, 0, SMALL_BYTES, EXPRESS, 0, 0, 0, 0, 0, 0, 0, WASTE, 0},
		{}, {}, {}, {}}
elseif operation ~= 'acquire' then
	-- A server without memory refuses what may take some, but not if something was written before. Who
	-- is there shall be able to stay and to go.
	call('HDEL', M, '')
end

-- Keys can vanish one by one, where the server is told to evict them. What is left is then worth nothing.
local is_held, is_queued, is_usable = pool.holders > 0, pool.waiters > 0, run and run ~= ''
if is_usable and (is_held or is_queued) then
	-- M, which is there, stands for those that need not be.
	is_usable = call('EXISTS', J, is_held and H or M, is_queued and Q or M, is_queued and L or M,
		pool.small_waiters > 0 and S or M) == 5
end

-- Was it this server process that wrote the data? Another one, after a crash or a failover, has what was on
-- its disk, or what it had been sent. Also where all processes look alike (no random addresses) one that
-- took long to come is found out.
local place = server_place()
if not is_usable or place ~= pool.place or math.abs(server + pool.ahead - pool.hw) >= GAP then
	local info = server_info()
	local current = string.match(info, 'run_id:(%w+)')
	pool.place, is_changed = place, true
	if not is_usable or run ~= current then
		-- A new epoch begins. Whoever held a slot shows up within a beat, and is let in first. How long
		-- that is waited for depends on whether there can have been somebody, and on the lease that is
		-- usual here: the one who asks first may have another.
		local usual = pool.lease > 0 and pool.lease or lease
		local somebody = is_usable and (is_held or now - pool.hw < usual)
		if not is_usable then
			pool.used, pool.express_used, pool.shares, pool.places = 0, 0, 0, ''
			pool.holders, pool.waiters, pool.small_waiters, pool.urgent_waiters = 0, 0, 0, 0
			pool.free, pool.renewed, members = 0, 0, {}
			local kept = call('HGET', M, 'limits')
			local left = call('DEL', H, Q, S, L) > 0
			call('DEL', M, J)
			if kept then
				call('HSET', M, 'limits', kept)
			end
			somebody = known_epoch > 0 or left or (is_known and is_held)
			-- Also above those that were given in this millisecond.
			pool.fence = math.max(pool.fence, (server + 1) * 1024)
		end
		local started = now - tonumber(string.match(info, 'uptime_in_seconds:(%d+)')) * 1000
		pool.epoch = math.max(pool.epoch, known_epoch, server - 1) + 1
		pool.opened = now
		pool.grace = (somebody and now or started) + math.ceil(usual / 2)
		run, is_marked = current, true
	end
end
pool.ahead, pool.hw = now - server, now

-- Nobody could send a heartbeat while the server was away.
if now >= pool.grace and now >= pool.due then
	pool.due, is_changed = now + KEPT, true
	for _, key in ipairs({H, L}) do
		for _, id in ipairs(call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, MOST_REAPED)) do
			forget(id, must_find(id))
		end
		pool.due = math.min(pool.due, tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or pool.due))
	end
end
grant_those_that_fit()

-- ---- Answers ----------------------------------------------------------------------------------------

local function describe(member)
	return 'job ' .. member.job .. ', rank ' .. member.rank .. ' on ' .. member.node
end

-- {state, fence, epoch, weight, position, capacity, next beat, ahead, number in the queue, place}
local function answer_waiter(position, tag)
	local beat, ahead = math.ceil(lease / 3), ''
	if position == 0 then
		-- The next one looks whether who holds a slot is still alive.
		local first = call('ZRANGE', H, 0, 0, 'WITHSCORES')
		ahead = first[1] and describe(must_find(first[1])) or ''
		beat = math.max(1, math.min(beat, math.max(tonumber(first[2] or 0), pool.grace) - now))
	elseif position <= NEAR then
		ahead = describe(must_find(string.sub(call('ZRANGE', Q, position - 1, position - 1)[1], 17)))
	end
	return {WAITING, 0, pool.epoch, 0, position, capacity(), beat, ahead, tonumber(string.sub(tag, 1, 16)), 0}
end

-- No member: there is none.
local function answer(member)
	if not member then
		return {0, 0, pool.epoch, 0, 0, capacity(), 0, '', 0, 0}
	elseif member.state == HOLDING then
		local beat = math.ceil(lease / 3)
		return {HOLDING, member.fence, pool.epoch, member.given, 0, capacity(), beat, '', 0, member.place}
	end
	return answer_waiter(call('ZRANK', Q, member.tag) or start_anew(), member.tag)
end

-- Whoever asks about a request that is known shows that it lives, whatever the question was; and counts
-- on a whole lease from then, also if its slot was given before, for half of one.
local function renewed(id, member)
	lease_until(member.state == HOLDING and H or L, id, now + lease)
	return answer(member)
end

-- ---- Operations -------------------------------------------------------------------------------------

-- Only the one that is asked for is made.
local operate

if operation == 'acquire' then
	local function expected_cost(job, bytes, weight)
		local time = job.usual
		if bytes > 0 then
			local known = job.bytes > 0 and job or pool
			-- Those of its job that queue behind one that announces far too much would have tags far
			-- too late.
			time = math.min(1 + bytes * known.ms / known.bytes, math.max(BELIEVED, 8 * job.usual))
		end
		return time * weight
	end

	-- Where in the queue it begins, if its job's turn comes at `start`. What a job says of itself counts
	-- within bounds, so that nobody waits for ever; what the operator says of it counts as it is.
	local function place_of(start, advance, own_share, set_share)
		if order() == FAIR then
			return pool.base + start
		elseif order() == FIRST then
			return pool.base + now
		end
		local function earlier(share)
			return share == USUAL_SHARE and 0
				or math.floor(DOUBLE * math.log(share / USUAL_SHARE) / math.log(2))
		end
		advance = advance + (set_share and 0 or earlier(own_share))
		advance = math.max(math.min(advance, ADVANCE), -ADVANCE)
		return math.max(pool.base, pool.base + now + ADVANCE - advance - (set_share and earlier(set_share) or 0))
	end

	local function enqueue(id, member, place)
		pool.seq = pool.seq + 1
		member.state, member.since = WAITING, now
		member.tag = string.format('%016.0f', pool.seq) .. id
		mark('HSET', M, 'run', '') -- which a server without memory refuses
		call('ZADD', Q, place, member.tag)
		lease_until(L, id, now + lease)
		members[id], to_write[id] = member, member
		if member.small_start then
			call('ZADD', S, member.small_start, member.tag)
			if pool.small_waiters == 0 then
				call('PEXPIRE', S, KEPT)
			end
			pool.small_waiters = pool.small_waiters + 1
		end
		if member.urgent then
			pool.urgent_waiters = pool.urgent_waiters + 1
		end
		if pool.waiters == 0 then
			call('PEXPIRE', Q, KEPT)
			call('PEXPIRE', L, KEPT)
		end
		pool.waiters = pool.waiters + 1
	end

	-- client node job rank share weight bytes asked-capacity default-capacity never-wait user urgent
	-- advance
	operate = function(client, node, job_name, rank, own_share, weight, bytes, asked, usual, never_wait,
			user, urgent, advance)
		local id, member = subject, members[subject]
		pool.lease, is_changed = lease, true
		if member then
			return renewed(id, member)
		end
		own_share, weight, bytes = tonumber(own_share), tonumber(weight), tonumber(bytes)
		local set_share
		for _, limit in ipairs({limit_of('user', user) or {}, limit_of('job', job_name)}) do
			set_share = (limit.share or 0) > 0 and limit.share or set_share
		end
		local share = set_share or own_share
		local idle = pool.holders + pool.waiters == 0
		if idle or pool.cap == 0 then
			-- Nobody is disturbed, or what was asked for is lost.
			pool.cap = tonumber(asked) > 0 and tonumber(asked) or tonumber(usual)
			pool.by = tonumber(asked) > 0 and 1 or 0
		end
		if idle then
			pool.busy = pool.busy + 1
			pool.vt, pool.served, pool.small_vt, pool.shares, pool.base = 0, 0, 0, 0, 0
		end
		local job = load_job(job_name)
		local cost = expected_cost(job, bytes, weight)
		-- Never before one of the same job that came earlier, whatever that was charged since.
		local start = math.max(pool.vt, job.finish, job.latest)
		job.finish, job.latest = start + cost / share, start
		urgent = urgent == '1' or nil
		local at_once = now >= pool.grace and pool.waiters == 0 and fits(weight, urgent)
		local small = pool.set_small > 0 and pool.set_small or SMALL_BYTES
		local small_start
		if not at_once and bytes > 0 and bytes <= small and weight == 1 then
			small_start = math.max(pool.small_vt, job.small_finish)
			job.small_finish = small_start + cost / share
		end
		job.user = user
		join(job, share)
		member = {
			node = node, job = job_name, rank = rank, client = client, share = share, weight = weight,
			bytes = bytes, lease = lease, cost = cost, start = urgent and 0 or start,
			small_start = small_start, passed = 0, urgent = urgent,
			places = math.min(tonumber(usual), MOST_PLACES), place = 0
		}
		local told
		if at_once then
			admit(id, member, weight, now + lease)
			told = answer(member)
		else
			enqueue(id, member, urgent and URGENT or place_of(start, tonumber(advance), own_share, set_share))
			grant_those_that_fit()
			if member.state == WAITING and never_wait == '1' then
				store_job(job_name, job)
				forget(id, member)
				return answer()
			end
			told = member.state == HOLDING and renewed(id, member) or answer(member)
		end
		store_job(job_name, job)
		return told
	end

elseif operation == 'beat' then
	-- number-in-the-queue (0: it has none) passed holding fence weight bytes client node job rank share
	operate = function(_, passed, holding, fence, given, bytes, client, node, job_name, rank, share)
		local id = subject
		-- Its lease ends later than before: `due` holds.
		if ticket and call('ZADD', L, 'XX', 'CH', now + lease, id) == 1 then
			local tag = string.format('%016.0f', ticket) .. id
			local position = call('ZRANK', Q, tag)
			if position then
				return answer_waiter(position, tag)
			end
		end
		local member = find_member(id)
		passed = tonumber(passed)
		-- Whoever was given its slot in an epoch that is over may have it again, as long as its lease, had
		-- it been renewed just then, would last.
		if holding == '1' and known_epoch ~= pool.epoch and now < pool.opened + lease
			and not (member and member.state == HOLDING) then
			if member then
				forget(id, member)
			end
			given, share = tonumber(given), tonumber(share)
			member = {
				node = node, job = job_name, rank = rank, client = client, share = share,
				weight = math.max(given, 1), bytes = tonumber(bytes), lease = lease, cost = 0,
				passed = passed, given = given, fence = tonumber(fence), places = 0, place = 0
			}
			pool.fence = math.max(pool.fence, member.fence)
			local job = load_job(job_name)
			join(job, share)
			hold(id, member, given, now + lease)
			store_job(job_name, job)
			return answer(member)
		end
		if not member then
			return answer()
		end
		if member.state == HOLDING and member.passed ~= passed then
			member.passed, to_write[id] = passed, member
		end
		return renewed(id, member)
	end

elseif operation == 'release' then
	-- passed: 0 if there is no such member, 1 otherwise
	operate = function(passed)
		if not members[subject] then
			return 0
		end
		forget(subject, members[subject], tonumber(passed))
		grant_those_that_fit()
		return 1
	end

elseif operation == 'pace' then
	-- bytes job-rate user: {bytes, start, end}
	operate = function(bytes, own_rate, user)
		bytes = tonumber(bytes)
		local function lower(a, b)
			return a > 0 and b > 0 and math.min(a, b) or math.max(a, b)
		end
		local limit, of_user = limit_of('job', subject), limit_of('user', user) or {rate = 0}
		local of_job = {rate = lower(lower(tonumber(own_rate), pool.set_job_rate), limit and limit.rate or 0)}
		local of_pool = {rate = pool.set_pool_rate, free = pool.free}
		local rate, start = lower(lower(of_job.rate, of_user.rate), of_pool.rate), now
		if rate == 0 then
			return {0, 0, 10000}
		end
		local job = of_job.rate > 0 and load_job(subject)
		of_job.free = job and job.paces == pool.paces and job.free or 0
		local paced = {of_pool, of_job, of_user}
		if bytes > 0 then
			local writers = math.min(math.max(pool.holders, 1), PACE_WRITERS)
			bytes = math.max(bytes, math.floor(rate * PACE_MS / 1000 / writers))
			for _, each in ipairs(paced) do
				start = math.max(start, each.rate > 0 and each.free or 0)
			end
		end
		-- What comes back was the last that was given, unless others came after it: nobody loses.
		for _, each in ipairs(paced) do
			if each.rate > 0 then
				each.free = (bytes > 0 and start or each.free) + bytes * 1000 / each.rate
			end
		end
		pool.free, is_changed = of_pool.free, true
		if job then
			job.free, job.paces = of_job.free, pool.paces
			store_job(subject, job)
		end
		if of_user.rate > 0 then
			call('HSET', M, 'limits', cmsgpack.pack(limits))
		end
		if bytes <= 0 then
			return {0, 0, 0}
		end
		return {bytes, math.floor(start - now), math.ceil(start - now + bytes * 1000 / rate)}
	end

elseif operation == 'set' or operation == 'limit' or operation == 'kick' then
	-- clear capacity pool-rate job-rate small express order (0: as it was)
	local function set(clear, slots, pool_rate, job_rate, small, beside, sequence)
		local order_before = order()
		for name, given in pairs({
			set_capacity = slots, set_pool_rate = pool_rate, set_job_rate = job_rate, set_small = small,
			set_express = beside, set_order = sequence
		}) do
			local value = tonumber(given)
			pool[name] = (value > 0 or clear == '1') and value or pool[name]
		end
		if order() ~= order_before and pool.waiters > 0 then
			-- Those that wait come before all in the new order.
			pool.base = math.max(tonumber(call('ZRANGE', Q, -1, -1, 'WITHSCORES')[2]), 0)
		end
		if clear == '1' or tonumber(pool_rate) + tonumber(job_rate) > 0 then
			-- What was given in advance at the rate before is owed by nobody.
			pool.free, pool.paces = 0, pool.paces + 1
		end
		pool.changed, pool.renewed, is_changed = server, 0, true
		return 1
	end

	-- kind name clear share rate (0: as it was)
	local function limit(kind, name, clear, share, rate)
		name, share, rate = string.sub(name, 1, MOST_NAME), tonumber(share), tonumber(rate)
		local key = kind .. ':' .. name
		local found = limit_of(kind, name)
		limits = limits or {}
		if clear == '1' and found then
			limits[key], pool.limits = nil, pool.limits - 1
		elseif clear ~= '1' then
			if not found and pool.limits == MOST_LIMITS then
				return 0
			end
			pool.limits = pool.limits + (found and 0 or 1)
			found = found or {share = 0, rate = 0}
			found.share, found.rate = share > 0 and share or found.share, rate > 0 and rate or found.rate
			found.free, limits[key] = 0, found
		end
		call('HSET', M, 'limits', cmsgpack.pack(limits))
		pool.paces, pool.changed, pool.renewed, is_changed = pool.paces + 1, server, 0, true
		return 1
	end

	local function kick()
		if not members[subject] then
			return 0
		end
		forget(subject, members[subject])
		return 1
	end

	operate = function(...)
		local done = (operation == 'set' and set or operation == 'limit' and limit or kick)(...)
		grant_those_that_fit()
		return done
	end

elseif operation == 'heal' then
	operate = function()
		return 1
	end

elseif operation == 'status' then
	-- In the last 60 s, if those of the minute before came evenly.
	local function grants_last_minute()
		local minute, left = math.floor(now / 60000), 1 - now % 60000 / 60000
		local granted = 0
		if minute == pool.minute then
			granted = pool.this_minute + pool.last_minute * left
		elseif minute == pool.minute + 1 then
			granted = pool.this_minute * left
		end
		return math.floor(granted + 0.5)
	end

	-- Those that wrote most, with what they have written in the slots that they hold.
	local function job_rows(holders)
		local all, jobs, held, rows = call('HGETALL', J), {}, {}, {}
		for _, holder in ipairs(holders) do
			local member = holder.member
			held[member.job] = (held[member.job] or 0) + member.passed
		end
		for i = 1, #all, 2 do
			local job = unpack_job(all[i + 1])
			job.name = all[i]
			job.written = job.written + (held[job.name] or 0)
			jobs[#jobs + 1] = job
		end
		table.sort(jobs, function(a, b)
			return a.written > b.written or (a.written == b.written and a.name < b.name)
		end)
		for i = 1, math.min(#jobs, LISTED_JOBS) do
			local job = jobs[i]
			rows[i] = {job.name, job.user, job.written, job.writes, job.held, job.waited}
		end
		return rows
	end

	local function row(id, member, deadline)
		return {
			id, member.job, member.node, member.rank, member.weight,
			member.state == HOLDING and member.given == 0 and 1 or 0, member.bytes,
			member.passed, member.fence or 0, now - member.since, (deadline or 0) - now,
			member.urgent and 1 or 0
		}
	end

	-- usual-capacity: {{numbers}, {holders, oldest first}, {waiters, the next one first}, {jobs, by what they
	-- wrote}, {limits}}
	operate = function(usual)
		local held, queue = call('ZRANGE', H, 0, -1, 'WITHSCORES'), call('ZRANGE', Q, 0, LISTED - 1)
		local all, holders, waiters = {}, {}, {}
		for i = 1, #held, 2 do
			all[#all + 1] = {id = held[i], member = must_find(held[i]), deadline = held[i + 1]}
		end
		table.sort(all, function(a, b)
			local left, right = a.member.fence, b.member.fence
			return left < right or (left == right and a.id < b.id)
		end)
		for i = 1, math.min(#all, LISTED) do
			holders[i] = row(all[i].id, all[i].member, all[i].deadline)
		end
		for i, tag in ipairs(queue) do
			local id = string.sub(tag, 17)
			waiters[i] = row(id, must_find(id), call('ZSCORE', L, id))
		end
		local limited = {}
		limit_of('', '')
		for key, limit in pairs(limits or {}) do
			local kind, name = string.match(key, '^(%a+):(.*)$')
			limited[#limited + 1] = {kind, name, limit.share, limit.rate}
		end
		table.sort(limited, function(a, b)
			return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2])
		end)
		local slots = pool.set_capacity + pool.cap > 0 and capacity() or tonumber(usual)
		local by = pool.set_capacity > 0 and 2 or pool.by
		local small = pool.set_small > 0 and pool.set_small or SMALL_BYTES
		return {
			{
				slots, by, pool.used, pool.set_pool_rate, pool.set_job_rate, small, express(),
				pool.grants, grants_last_minute(), pool.waiters, pool.holders,
				pool.written, pool.held, pool.waited, order(), pool.changed
			}, holders, waiters, job_rows(all), limited
		}
	end
end

local is_look, result = operation == 'status', nil
if not is_look then
	result = operate(unpack(ARGV, 5))
end
local fields, renew = is_marked and {'run', run} or {}, now - pool.renewed > KEPT / 4
for id, member in pairs(to_write) do
	fields[#fields + 1] = 'm:' .. id
	fields[#fields + 1] = cmsgpack.pack(
		member.job, member.node, member.rank, member.client, member.share, member.weight,
		member.bytes, member.lease, member.cost, member.start, member.small_start, member.urgent,
		member.tag, member.state, member.since, member.given, member.fence, member.passed,
		member.waited, member.places, member.place)
end
if is_changed or renew then
	pool.renewed = renew and now or pool.renewed
	fields[#fields + 1] = 'pool'
	fields[#fields + 1] = cmsgpack.pack(
		pool.epoch, pool.opened, pool.grace, pool.hw, pool.ahead, pool.place, pool.lease, pool.due,
		pool.renewed, pool.tidied, pool.busy, pool.cap, pool.by, pool.used, pool.express_used,
		pool.holders, pool.waiters, pool.small_waiters, pool.urgent_waiters, pool.shares, pool.vt,
		pool.served, pool.small_vt, pool.fence, pool.seq, pool.ms, pool.bytes, pool.free,
		pool.paces, pool.grants, pool.minute, pool.this_minute, pool.last_minute, pool.set_capacity,
		pool.set_pool_rate, pool.set_job_rate, pool.set_small, pool.set_express,
		pool.written, pool.held, pool.waited, pool.limits, pool.base, pool.set_order, pool.places,
		pool.turn, pool.changed)
end
if #fields > 0 then
	call('HSET', M, unpack(fields))
end
if renew then
	for _, key in ipairs({M, H, Q, S, L, J}) do
		call('PEXPIRE', key, KEPT)
	end
	-- What the operator set is kept until it is cleared.
	if pool.set_capacity + pool.set_pool_rate + pool.set_job_rate + pool.set_small + pool.set_express
		+ pool.set_order + pool.limits > 0 then
		call('PERSIST', M)
	end
end
-- A user may lack the right to look further.
return is_look and operate(unpack(ARGV, 5)) or result
