-- SPDX-License-Identifier: Apache-2.0
-- Who may write, as Redis decides it. docs/slots.md says the rules in words. All times are milliseconds,
-- all costs slot-milliseconds.
--
-- KEYS[1]      {ios:POOL}:vN:m, where N is the number of this format (SCRIPT_FORMAT); the others are beside it
-- ARGV[1]      the operation; the rest is said at each function of `operations`
--
--   :m  hash   the pool: counters, clock, what the operator set, who last did
--   :d  hash   who holds or waits, by id (packed)
--   :h  zset   ids of holders, by the end of their lease
--   :q  zset   waiters by start tag; the member begins with a number that rises, for those alike
--   :s  zset   the small ones among them, by start tags of their own; the same members
--   :l  zset   ids of waiters, by when they are taken for dead
--   :j  hash   where each job's next request begins (packed)
--   :p  hash   when each job's bandwidth is free again
--   :w:CLIENT  list: ids of that client's requests that were granted while it waited

local MOST_REAPED = 16 -- dead holders, and as many waiters, per call
local MOST_GRANTED = 32 -- per call
local MOST_JOBS = 1000 -- when there are more, those that were not seen for longest are forgotten ...
local KEPT_JOBS = 500 -- ... but for so many that have nothing in the pool
local TIDIED = 60000 -- not more often than that
local LISTED_JOBS = 64 -- those that wrote most, in a status
local KEPT_ACTS = 8 -- of operators
local LISTED = 256 -- holders, and waiters, in a status
local NEAR = 100 -- up to this position one is told who goes before it, not who holds a slot
local KEPT = 24 * 3600 * 1000 -- an abandoned pool is forgotten after so long
local OPERATORS_LEASE = 15000 -- what an operator's command takes the leases to be
local GAP = 100 -- silence after which we look more closely whether the server is still the same
local SMALL_BYTES = 16 * 1024 * 1024
local EXPRESS = 1
local URGENT_START = -1 -- before all that have no deadline
local LEARNING = 1 / 8 -- weight of the latest write in what is known of speeds
local FIRST_MS, FIRST_BYTES = 16, 16e6 -- what the first write is taken to have had
local BELIEVED = 300 * 1000 -- at most, or eight times its job's usual time: what bytes make us expect
local UNKNOWN_COST = 1000 -- of a request that says no size, from a job not seen before
local PACE_MS = 250 -- a grant of bandwidth lasts about so long ...
local PACE_WRITERS = 8 -- ... shared by so many writers at most

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

-- Where this process happens to have its tables: no other has them there, nor does asking cost anything.
local function server_place()
	return tostring(redis)
end

local function server_info()
	return call('INFO', 'server')
end

local function keep(...)
	for _, key in ipairs({...}) do
		call('PEXPIRE', key, KEPT)
	end
end

-- ---- The pool's numbers ---------------------------------------------------------------------------

-- By name, so that an older script carries along what a newer one added. What is not there is 0.
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
--   cap          capacity, as the jobs ask for it
--   by           1: a job asked; 0: the default
--   lease        of the latest request
--   busy         counts the times that the pool began to be used: older tags of jobs are forgotten
--   ms, bytes    time and size of the latest writes
--   free         when the pool's bandwidth is free again
--   grants; and this_minute, last_minute: in them; minute: which one this is
--   tidied       when jobs were last forgotten
--   renewed      when the keys' expiry was last set
--   place        of the server process that wrote this
--   set_capacity, set_pool_rate, set_job_rate, set_small, set_express: by the operator
local pool
local server -- its clock: fences, epochs and records are made of it, so that they rise if all else is lost
local now -- the pool's clock: all else

local function load_pool()
	local values = call('HMGET', M, 'run', 'pool')
	pool = values[2] and cmsgpack.unpack(values[2]) or {ms = FIRST_MS, bytes = FIRST_BYTES}
	setmetatable(pool, {__index = function()
		return 0
	end})
	return values[1], values[2]
end

local function store_pool()
	call('HSET', M, 'pool', cmsgpack.pack(pool))
end

local function was_set()
	return pool.set_capacity + pool.set_pool_rate + pool.set_job_rate + pool.set_small
		+ pool.set_express > 0
end

-- What the operator set is kept until it is cleared.
local function keep_all()
	pool.renewed = now
	keep(D, H, Q, S, L, J, P)
	if was_set() then
		call('PERSIST', M)
	else
		keep(M)
	end
end

local function capacity()
	return math.max(pool.set_capacity > 0 and pool.set_capacity or pool.cap, 1)
end

local function small_bytes()
	return pool.set_small > 0 and pool.set_small or SMALL_BYTES
end

local function express()
	return pool.set_express > 0 and pool.set_express or EXPRESS
end

-- ---- Lost data --------------------------------------------------------------------------------------

-- True if there was something.
local function wipe()
	pool.used, pool.express_used, pool.shares = 0, 0, 0
	pool.holders, pool.waiters, pool.small_waiters, pool.urgent_waiters = 0, 0, 0, 0
	pool.free, pool.renewed = 0, 0
	local members = call('DEL', D)
	call('DEL', H, Q, S, L, J, P)
	return members > 0
end

-- Keys can vanish one by one, where the server is told to evict them. What is left is then worth nothing.
local function is_complete()
	local held, queued = pool.holders > 0, pool.waiters > 0
	if not held and not queued then
		return true
	end
	-- M, which is there, stands for those that need not be.
	return call('EXISTS', D, J, held and H or M, queued and Q or M, queued and L or M,
		pool.small_waiters > 0 and S or M) == 6
end

-- The data is not what it was: a new epoch begins. Whoever held a slot shows up within a beat, and is
-- let in first. How long that is waited for depends on whether there can have been somebody, and on the
-- lease that is usual here: the one who asks first may have another.
local function open_epoch(somebody, started, known_epoch, lease)
	pool.epoch = math.max(pool.epoch, known_epoch, server - 1) + 1
	pool.opened = now
	pool.grace = (somebody and now or started) + math.ceil(lease / 2)
end

-- Is the data there, and of one piece, and was it this server process that wrote it? Another one, after
-- a crash or a failover, has what was on its disk, or what it had been sent.
local function look_at_data(run, known, clock, known_epoch, lease)
	local held = pool.holders > 0
	lease = pool.lease > 0 and pool.lease or lease
	local usable = run and is_complete()
	local place = server_place()
	-- Also where all processes look alike (no random addresses) one that took long to come is found out.
	if usable and place == pool.place and math.abs(clock - pool.hw) < GAP then
		return
	end
	pool.place = place
	local info = server_info()
	local current = string.match(info, 'run_id:(%w+)')
	if usable and run == current then
		return
	end
	local somebody = usable and (held or now - pool.hw < lease)
	if not usable then
		local left = wipe()
		somebody = known_epoch > 0 or left or (known and held)
		-- Also above those that were given in this millisecond.
		pool.fence = math.max(pool.fence, (server + 1) * 1024)
	end
	local uptime = tonumber(string.match(info, 'uptime_in_seconds:(%d+)')) * 1000
	open_epoch(somebody, now - uptime, known_epoch, lease)
	call('HSET', M, 'run', current)
end

-- ---- Members ----------------------------------------------------------------------------------------

local WAITING, HOLDING = 1, 2

local function load_member(id)
	local packed = call('HGET', D, id)
	return packed and cmsgpack.unpack(packed)
end

-- The client asks again, and finds a new epoch. (Takes no memory, so that it always can be done.)
local function start_anew()
	call('HDEL', M, 'run')
	error('IOSHAPE-ANEW')
end

-- For an id that stands in one of the sets.
local function must_load_member(id)
	return id and load_member(id) or start_anew()
end

local function store_member(id, member)
	call('HSET', D, id, cmsgpack.pack(member))
end

local function describe(member)
	return 'job ' .. member.job .. ', rank ' .. member.rank .. ' on ' .. member.node
end

-- ---- Jobs -------------------------------------------------------------------------------------------

-- What is remembered of a job. `members` it has in the pool, with its `share`, in the pool's busy time
-- number `busy`; its next request begins at `finish`, the latest one did at `latest`; `small_finish` is the
-- same among small ones; `usual` is what those without a size cost; `ms` and `bytes` are time and size of
-- its latest writes. In `writes` slots that it had it wrote `written` bytes; it was last `seen` then.
local function new_job()
	return {
		busy = 0, members = 0, share = 0, finish = 0, latest = 0, small_finish = 0,
		usual = UNKNOWN_COST, ms = 0, bytes = 0, user = '', writes = 0, written = 0, seen = 0
	}
end

local function load_job(name)
	local packed = call('HGET', J, name)
	local job = packed and cmsgpack.unpack(packed) or new_job()
	if job.busy ~= pool.busy then
		job.busy, job.members = pool.busy, 0
		job.finish, job.latest, job.small_finish = 0, 0, 0
	end
	return job
end

local function store_job(name, job)
	call('HSET', J, name, cmsgpack.pack(job))
end

local function join(job, share)
	if job.members == 0 then
		job.share = share
		pool.shares = pool.shares + share
	end
	job.members = job.members + 1
end

local function forget_old_jobs()
	local all, absent = call('HGETALL', J), {}
	pool.tidied = now
	for i = 1, #all, 2 do
		local job = cmsgpack.unpack(all[i + 1])
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

local function leave(name, job)
	job.members, job.seen = job.members - 1, now
	store_job(name, job)
	if job.members == 0 then
		pool.shares = pool.shares - job.share
		if now - pool.tidied > TIDIED and call('HLEN', J) > MOST_JOBS then
			forget_old_jobs()
		end
	end
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

local function forget_holder(id, member)
	call('ZREM', H, id)
	pool.holders = pool.holders - 1
	pool.used = pool.used - member.given
	if member.given == 0 then
		pool.express_used = pool.express_used - 1
	end
end

-- `passed` if it is the holder that says so. What takes no memory comes first: a server that has none
-- left would refuse the rest if nothing was written before it.
local function forget(id, member, passed)
	if member.state == HOLDING then
		forget_holder(id, member)
	else
		forget_waiter(id, member)
	end
	call('HDEL', D, id)
	local name = member.job
	local job = load_job(name)
	if job.members == 0 then
		start_anew()
	end
	if member.state == WAITING then
		job.finish = math.max(job.finish - member.cost / member.share, 0)
	elseif member.cost > 0 then -- it was not reclaimed
		settle(job, member, passed)
	end
	if member.state == HOLDING then
		job.writes = (job.writes or 0) + 1
		job.written = (job.written or 0) + (passed or member.passed)
	end
	leave(name, job)
end

local function hold(id, member, given, lease)
	member.state, member.since, member.given = HOLDING, now, given
	call('ZADD', H, now + lease, id)
	store_member(id, member)
	if pool.holders == 0 then
		keep(H)
	end
	if pool.holders + pool.waiters == 0 then
		keep(D, J)
	end
	pool.holders = pool.holders + 1
	pool.used = pool.used + given
	if given == 0 then
		pool.express_used = pool.express_used + 1
	end
end

local function count_grant()
	local minute = math.floor(now / 60000)
	if minute ~= pool.minute then
		pool.last_minute = minute == pool.minute + 1 and pool.this_minute or 0
		pool.this_minute, pool.minute = 0, minute
	end
	pool.this_minute = pool.this_minute + 1
	pool.grants = pool.grants + 1
end

local function admit(id, member, given, lease)
	pool.fence = math.max(pool.fence + 1, server * 1024)
	count_grant()
	if given > 0 then
		-- As if all who want slots were served at once, each by its share; and never behind the one
		-- that is served, so that new jobs do not pass old ones for ever.
		pool.served = math.max(pool.served, member.start)
		pool.vt = math.max(pool.vt + member.cost / pool.shares, pool.served)
	else
		pool.small_vt = math.max(pool.small_vt + member.cost / pool.shares, member.small_start)
	end
	member.fence = pool.fence
	hold(id, member, given, lease)
end

-- A slot for who waits. It has half of its lease to show that it knows: if the wake is lost, the next
-- beat comes after a third.
local function grant(id, member, given)
	forget_waiter(id, member)
	admit(id, member, given, math.ceil(member.lease / 2))
	local wake = prefix .. 'w:' .. member.client
	call('RPUSH', wake, id)
	call('PEXPIRE', wake, member.lease)
end

-- More than there is may come in when it is alone; and one with a deadline beside those that have slots.
local function fits(weight, urgent)
	return pool.used == 0 or pool.used + weight <= capacity() or (urgent and pool.used <= capacity())
end

-- Says how many.
local function grant_those_that_fit()
	local granted = 0
	if now < pool.grace then
		return granted
	end
	while pool.waiters > 0 and granted < MOST_GRANTED
		and (pool.used < capacity() or pool.urgent_waiters > 0) do
		local id = string.sub(call('ZRANGE', Q, 0, 0)[1], 17)
		local member = must_load_member(id)
		if not fits(member.weight, member.urgent) then
			break
		end
		grant(id, member, member.weight)
		granted = granted + 1
	end
	while pool.small_waiters > 0 and granted < MOST_GRANTED and pool.express_used < express() do
		local id = string.sub(call('ZRANGE', S, 0, 0)[1], 17)
		grant(id, must_load_member(id), 0)
		granted = granted + 1
	end
	return granted
end

local function reap(zset)
	for _, id in ipairs(call('ZRANGEBYSCORE', zset, '-inf', now, 'LIMIT', 0, MOST_REAPED)) do
		forget(id, must_load_member(id))
	end
end

-- What every operation begins with.
local function tick(known_epoch, lease)
	local run, known = load_pool()
	server = server_ms()
	local clock = server + pool.ahead
	now = math.max(clock, pool.hw)
	look_at_data(run, known, clock, known_epoch, lease)
	pool.ahead = pool.ahead + now - clock
	pool.hw = now
	-- Nobody could send a heartbeat while the server was away.
	if now >= pool.grace then
		if pool.holders > 0 then
			reap(H)
		end
		if pool.waiters > 0 then
			reap(L)
		end
	end
	grant_those_that_fit()
	if now - pool.renewed > KEPT / 4 then
		keep_all()
	end
end

-- ---- Answers ----------------------------------------------------------------------------------------

-- {state, fence, epoch, weight, position, capacity, next beat, ahead}
local function nobody()
	return {0, '0', whole(pool.epoch), 0, 0, capacity(), 0, ''}
end

local function holder(member)
	return {
		HOLDING, whole(member.fence), whole(pool.epoch), member.given, 0, capacity(),
		math.ceil(member.lease / 3), ''
	}
end

local function waiter(member)
	local position = call('ZRANK', Q, member.tag) or start_anew()
	local beat, ahead, id = math.ceil(member.lease / 3), '', nil
	if position > 0 and position <= NEAR then
		id = string.sub(call('ZRANGE', Q, position - 1, position - 1)[1], 17)
	else
		local first = call('ZRANGE', H, 0, 0, 'WITHSCORES')
		id = first[1]
		if position == 0 then
			-- The next one looks whether who holds a slot is still alive.
			local change = math.max(tonumber(first[2] or 0), pool.grace) - now
			beat = math.max(1, math.min(beat, change))
		end
	end
	if id then
		ahead = describe(must_load_member(id))
	end
	return {WAITING, '0', whole(pool.epoch), 0, position, capacity(), beat, ahead}
end

-- Whoever asks about a request that is known shows that it lives, whatever the question was; and counts
-- on a whole lease from then, also if its slot was given before, for half of one.
local function renewed(id, member, lease)
	local holds = member.state == HOLDING
	call('ZADD', holds and H or L, now + lease, id)
	return holds and holder(member) or waiter(member)
end

-- ---- Operators ---------------------------------------------------------------------------------------

local function load_acts()
	local packed = call('HGET', M, 'acts')
	return packed and cmsgpack.unpack(packed) or {}
end

-- {when, who, what}, the latest last.
local function note_act(who, what)
	local acts = load_acts()
	acts[#acts + 1] = {whole(server), who, what}
	if #acts > KEPT_ACTS then
		table.remove(acts, 1)
	end
	call('HSET', M, 'acts', cmsgpack.pack(acts))
end

-- ---- Operations -------------------------------------------------------------------------------------

-- Only the one that is asked for is made: making them all would cost more than most of them do.
local operation, operate = ARGV[1], nil

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

	local function enqueue(id, member)
		pool.seq = pool.seq + 1
		member.state, member.since = WAITING, now
		member.tag = string.format('%016.0f', pool.seq) .. id
		store_member(id, member)
		call('ZADD', Q, exact(member.start), member.tag)
		call('ZADD', L, now + member.lease, id)
		if member.small_start then
			call('ZADD', S, exact(member.small_start), member.tag)
			if pool.small_waiters == 0 then
				keep(S)
			end
			pool.small_waiters = pool.small_waiters + 1
		end
		if member.urgent then
			pool.urgent_waiters = pool.urgent_waiters + 1
		end
		if pool.waiters == 0 then
			keep(Q, L)
		end
		if pool.holders + pool.waiters == 0 then
			keep(D, J)
		end
		pool.waiters = pool.waiters + 1
	end

	-- acquire id client node job rank share weight bytes lease asked-capacity default-capacity known-epoch
	-- never-wait user urgent
	operate = function(id, client, node, job_name, rank, share, weight, bytes, lease, asked, usual,
			known_epoch, never_wait, user, urgent)
		share, weight, bytes, lease = tonumber(share), tonumber(weight), tonumber(bytes), tonumber(lease)
		tick(tonumber(known_epoch), lease)
		pool.lease = lease
		local member = load_member(id)
		if member then
			return renewed(id, member, lease)
		end
		local idle = pool.holders + pool.waiters == 0
		if idle or pool.cap == 0 then
			-- Nobody is disturbed, or what was asked for is lost.
			pool.cap = tonumber(asked) > 0 and tonumber(asked) or tonumber(usual)
			pool.by = tonumber(asked) > 0 and 1 or 0
		end
		if idle then
			pool.busy = pool.busy + 1
			pool.vt, pool.served, pool.small_vt, pool.shares = 0, 0, 0, 0
		end
		local job = load_job(job_name)
		local cost = expected_cost(job, bytes, weight)
		-- Never before one of the same job that came earlier, whatever that was charged since.
		local start = math.max(pool.vt, job.finish, job.latest)
		job.finish, job.latest = start + cost / share, start
		urgent = urgent == '1' or nil
		local at_once = now >= pool.grace and pool.waiters == 0 and fits(weight, urgent)
		local small_start
		if not at_once and bytes > 0 and bytes <= small_bytes() and weight == 1 then
			small_start = math.max(pool.small_vt, job.small_finish)
			job.small_finish = small_start + cost / share
		end
		job.user = user
		join(job, share)
		store_job(job_name, job)
		member = {
			node = node, job = job_name, rank = rank, client = client, share = share, weight = weight,
			bytes = bytes, lease = lease, cost = cost, start = urgent and URGENT_START or start,
			small_start = small_start, passed = 0, urgent = urgent
		}
		if at_once then
			admit(id, member, weight, lease)
			return holder(member)
		end
		enqueue(id, member)
		if grant_those_that_fit() > 0 then
			member = must_load_member(id)
		end
		if member.state == WAITING and never_wait == '1' then
			forget(id, member)
			return nobody()
		end
		return renewed(id, member, lease)
	end

elseif operation == 'beat' then
	-- A slot that was held when the data was lost, by one that still holds it.
	local function reclaim(id, member)
		pool.fence = math.max(pool.fence, member.fence)
		local job = load_job(member.job)
		join(job, member.share)
		store_job(member.job, job)
		hold(id, member, member.given, member.lease)
	end

	-- beat id passed lease known-epoch holding fence weight bytes client node job rank share
	operate = function(id, passed, lease, known_epoch, holding, fence, given, bytes, client, node,
			job_name, rank, share)
		lease, known_epoch, passed = tonumber(lease), tonumber(known_epoch), tonumber(passed)
		tick(known_epoch, lease)
		local member = load_member(id)
		-- Whoever was given its slot in an epoch that is over may have it again, as long as its lease, had
		-- it been renewed just then, would last.
		if holding == '1' and known_epoch ~= pool.epoch and now < pool.opened + lease
			and not (member and member.state == HOLDING) then
			if member then
				forget(id, member)
			end
			given = tonumber(given)
			member = {
				node = node, job = job_name, rank = rank, client = client, share = tonumber(share),
				weight = math.max(given, 1), bytes = tonumber(bytes), lease = lease, cost = 0,
				passed = passed, given = given, fence = tonumber(fence)
			}
			reclaim(id, member)
			return holder(member)
		end
		if not member then
			return nobody()
		end
		if member.state == HOLDING and member.passed ~= passed then
			member.passed = passed
			store_member(id, member)
		end
		return renewed(id, member, lease)
	end

elseif operation == 'release' then
	-- release id passed lease known-epoch
	operate = function(id, passed, lease, known_epoch)
		tick(tonumber(known_epoch), tonumber(lease))
		local member = load_member(id)
		if not member then
			return 0
		end
		forget(id, member, tonumber(passed))
		grant_those_that_fit()
		return 1
	end

elseif operation == 'pace' then
	-- When this job's bandwidth is free again.
	local function job_free(name)
		local free = call('HGET', P, name)
		if not free and call('HLEN', P) >= MOST_JOBS then
			call('DEL', P) -- what each owes is a fraction of a second
		end
		return tonumber(free or '0')
	end

	-- pace job bytes job-rate lease known-epoch: {bytes, start, end}
	operate = function(job_name, bytes, job_rate, lease, known_epoch)
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
		local of_pool = pool_rate > 0 and pool.free or 0
		local of_job = job_rate > 0 and job_free(job_name) or 0
		local start = now
		if bytes > 0 then
			local writers = math.min(math.max(pool.holders, 1), PACE_WRITERS)
			bytes = math.max(bytes, math.floor(rate * PACE_MS / 1000 / writers))
			start = math.max(now, of_pool, of_job)
			of_pool, of_job = start, start
		end
		-- What comes back was the last that was given, unless others came after it: nobody loses.
		if pool_rate > 0 then
			pool.free = of_pool + bytes * 1000 / pool_rate
		end
		if job_rate > 0 then
			call('HSET', P, job_name, exact(of_job + bytes * 1000 / job_rate))
			keep(P)
		end
		if bytes <= 0 then
			return {0, 0, 0}
		end
		return {whole(bytes), math.floor(start - now), math.ceil(start - now + bytes * 1000 / rate)}
	end

elseif operation == 'set' then
	-- set who clear capacity pool-rate job-rate small express (0: as it was)
	operate = function(who, clear, slots, pool_rate, job_rate, small, beside)
		tick(0, OPERATORS_LEASE)
		local what = clear == '1' and 'clear' or 'set'
		local settings = {
			{'capacity', 'set_capacity', slots}, {'rate', 'set_pool_rate', pool_rate},
			{'job-rate', 'set_job_rate', job_rate}, {'small', 'set_small', small},
			{'express', 'set_express', beside}
		}
		for _, setting in ipairs(settings) do
			local label, name, value = setting[1], setting[2], tonumber(setting[3])
			local before = pool[name]
			if value > 0 or (clear == '1' and before > 0) then
				local was = before > 0 and ' (was ' .. whole(before) .. ')' or ''
				what = what .. ' ' .. label .. '=' .. whole(value) .. was
				pool[name] = value
			end
		end
		note_act(who, what)
		if clear == '1' or tonumber(pool_rate) + tonumber(job_rate) > 0 then
			-- What was given in advance at the rate before is owed by nobody.
			pool.free = 0
			call('DEL', P)
		end
		keep_all()
		grant_those_that_fit()
		return 1
	end

elseif operation == 'kick' then
	-- kick who what id
	operate = function(who, what, id)
		tick(0, OPERATORS_LEASE)
		local member = load_member(id)
		if not member then
			return 0
		end
		forget(id, member)
		note_act(who, what)
		grant_those_that_fit()
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
			local job = cmsgpack.unpack(all[i + 1])
			job.name = all[i]
			job.written = (job.written or 0) + (held[job.name] or 0)
			jobs[#jobs + 1] = job
		end
		table.sort(jobs, function(a, b)
			return a.written > b.written or (a.written == b.written and a.name < b.name)
		end)
		for i = 1, math.min(#jobs, LISTED_JOBS) do
			local job = jobs[i]
			rows[i] = {job.name, job.user or '', whole(job.written), whole(job.writes or 0)}
		end
		return rows
	end

	local function row(id, member, deadline)
		return {
			id, member.job, member.node, member.rank, member.weight,
			member.state == HOLDING and member.given == 0 and 1 or 0, whole(member.bytes),
			whole(member.passed), whole(member.fence or 0), whole(now - member.since),
			whole(tonumber(deadline or '0') - now), member.urgent and 1 or 0
		}
	end

	-- status usual-capacity: {{numbers}, {holders, oldest first}, {waiters, the next one first}, {jobs, by what
	-- they wrote}, {acts of operators, the latest last}}
	operate = function(usual)
		local held, queue, all, holders, waiters, jobs = {}, {}, {}, {}, {}, {}
		local granted, acts = 0, {}
		if call('EXISTS', M) == 1 then -- to look must not make a pool
			tick(0, OPERATORS_LEASE)
			held = call('ZRANGE', H, 0, -1, 'WITHSCORES')
			queue = call('ZRANGE', Q, 0, LISTED - 1)
			granted, acts = grants_last_minute(), load_acts()
		else
			load_pool()
		end
		for i = 1, #held, 2 do
			local member = must_load_member(held[i])
			all[#all + 1] = {id = held[i], member = member, deadline = held[i + 1]}
		end
		table.sort(all, function(a, b)
			return a.member.fence < b.member.fence
		end)
		for i = 1, math.min(#all, LISTED) do
			holders[i] = row(all[i].id, all[i].member, all[i].deadline)
		end
		for i, tag in ipairs(queue) do
			local id = string.sub(tag, 17)
			waiters[i] = row(id, must_load_member(id), call('ZSCORE', L, id))
		end
		if now then
			jobs = job_rows(all)
		end
		local slots = pool.set_capacity + pool.cap > 0 and capacity() or tonumber(usual)
		local by = pool.set_capacity > 0 and 2 or pool.by
		return {
			{
				slots, by, pool.used, whole(pool.set_pool_rate), whole(pool.set_job_rate),
				whole(small_bytes()), express(), whole(pool.grants), granted, pool.waiters,
				pool.holders
			}, holders, waiters, jobs, acts
		}
	end
end

if operation ~= 'acquire' then
	-- A server without memory refuses what may take some, but not if something was written before. Who
	-- is there shall be able to stay and to go.
	call('HDEL', M, '')
end
local answer = operate(unpack(ARGV, 2))
if now then
	store_pool()
end
return answer
