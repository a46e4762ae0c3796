-- SPDX-License-Identifier: Apache-2.0
-- Decide which requests may write. Redis runs this script for each call of a client (redis.c); docs/slots.md has the
-- rules. Times are milliseconds, costs are slot-milliseconds.
--
-- KEYS[1]  {ios:POOL}:vN:m, where N is REDIS_SCRIPT_FORMAT; the other keys have the same prefix
-- ARGV     operation; subject: the id of a request, or the name of a job; lease; the epoch that the client knows;
--          arguments of the operation
--
-- A call of Redis costs a microsecond, so each operation reads and writes the pool and a member in one call each.

local MOST_REAPED = 16 -- dead holders, and as many waiters, removed in one call
local MOST_GRANTED = 32 -- grants in one call
local MOST_JOBS = 1000 -- with this many jobs stored, forget those without members
local TIDIED = 60000 -- shortest time between two of these clean-ups
local NEAR = 10 -- a waiter up to this position is told which request is ahead of it
local KEPT = 24 * 3600 * 1000 -- an unused pool expires after this time
local GAP = 100 -- after a silence this long, check whether the server is still the same
local SMALL_BYTES, EXPRESS = 16 * 1024 * 1024, 1
local URGENT = -2 ^ 53 -- score of requests with a deadline
local TOGETHER = 1000 -- a job's requests within this time belong to one checkpoint ...
local TURN = 20 * 1000 -- ... and have one turn, of at most this much time of the whole pool
local BOOST = 300 * 1000 -- largest boost in either direction, in time of the whole pool
local LEARNING = 1 / 8 -- EWMA weight of the latest write in average times and speeds
local BELIEVED = 300 * 1000 -- limit of the time expected from a size; eight usual writes of the job may exceed it
local MOST_TARGETS = 64
local PACE_MS = 250 -- a grant of bandwidth lasts about this long ...
local PACE_WRITERS = 8 -- ... divided by the number of writers, but at most by this number
local LISTED = 256 -- waiters listed in a status
local MOST_SET = 128 -- largest number of settings of the operator
local ALARMS = {'nonfinite', 'unchanged', 'constant', 'jump'} -- by the bits of enum ioshape_alarm
local MOST_NAME = 80 -- longest name of a setting, in bytes

local operation, subject, lease, known_epoch = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local prefix = string.sub(KEYS[1], 1, -2)
local M, H, Q, S, L, J = KEYS[1], prefix .. 'h', prefix .. 'q', prefix .. 's', prefix .. 'l', prefix .. 'j'
local O = prefix .. 'o'
local call = redis.call
local encode, decode = cmsgpack.pack, cmsgpack.unpack

local function server_ms()
	local time = call('TIME')
	return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The address of a table differs between server processes, and reading it costs no call.
local function server_process()
	return tostring(redis)
end

local function server_info()
	return call('INFO', 'server')
end

-- ---- Data -------------------------------------------------------------------------------------------

-- The data of a pool:
--
--   :m  hash   `run`: run id of the server that wrote the data, '' during a write; `pool`, and `m:ID` of each holder
--              and waiter: packed tables with named fields
--   :h  zset   ids of holders, scored by the end of their lease
--   :q  zset   queue: tags of waiters, by score; a tag begins with a rising number, so that equals keep their order
--   :s  zset   tags of small requests in the queue, scored by their starts among small requests
--   :l  zset   ids of waiters, scored by the end of their lease
--   :j  hash   packed table of each job
--   :o  hash   settings of the operator: numbers by the names in SETTINGS, and by `job:NAME:share`, `job:NAME:rate`,
--              `user:NAME:share` and `user:NAME:rate`. It is kept when the data above is lost
--   :w:CLIENT  list: ids of the client's requests that were granted while it waited

local FIRST_MS, FIRST_BYTES = 16, 16e6 -- assumed speed before the first write
local UNKNOWN_COST = 1000 -- expected time of a request without a size, from a new job

local function new_pool()
	return {
		epoch = 0, -- number of this epoch: rises when data may have been lost
		opened = 0, -- when the epoch began
		grace = 0, -- end of the grace: until then only requests that held a slot before the loss get one
		now = 0, -- latest time seen: the pool's clock never goes back
		ahead = 0, -- the pool's clock minus the server's
		process = '', -- server process that wrote this
		lease = 0, -- lease of the latest request
		due = 0, -- no lease ends before this time
		renewed = 0, -- when the keys' expiry was last set
		tidied = 0, -- when jobs were last forgotten
		paced = 0, -- value of set.changed for which `free` is valid
		busy = 0, -- number of times that an idle pool came into use: jobs with an older number count as new
		fence = 0, -- latest fence
		seq = 0, -- number of requests that have waited
		capacity = 0, by_job = 0, -- default capacity: from a job's setting (by_job: 1) or by rule
		used = 0, express_used = 0, -- slots in use, by weight; small requests beside the slots
		holders = 0, waiters = 0, small_waiters = 0, urgent_waiters = 0,
		shares = 0, -- sum of the shares of jobs that have members
		virtual = 0, -- virtual time: slot-milliseconds that a job of share 1 could have had
		served = 0, -- highest floor of a granted request: virtual time never falls below it
		small_virtual = 0, -- virtual time of the small requests that used the bypass
		ms = FIRST_MS, bytes = FIRST_BYTES, -- decaying sums over the latest writes
		free = {}, -- when bandwidth is free again: of the pool, and of each job and user with a rate
		grants = 0,
		written = 0, held = 0, waited = 0, -- totals: bytes, times of slots, times of waiting
		targets = '', latest_target = 0 -- a byte for each group of storage targets: its number of writers
	}
end

-- `finish` and `latest` are the virtual end and start of the job's latest request. `turn` is the virtual start of its
-- turn, which began at the time `turn_began`. `small_finish` is the end of its latest small request among small ones.
-- `usual` is the average time of its writes, expected of a request without a size. `ms` and `bytes` are decaying sums
-- over its latest writes. They begin as those of the pool, because a small first write says little about large ones. A
-- job that raised alarms also has the number of each rule in ALARMS.
local function new_job(ms, bytes)
	return {
		busy = 0, members = 0, share = 0, finish = 0, latest = 0, turn = 0, turn_began = 0, small_finish = 0, usual = UNKNOWN_COST, ms = ms, bytes = bytes,
		user = '', writes = 0, written = 0, held = 0, waited = 0
	}
end

local stored = call('HMGET', M, 'run', 'pool', 'm:' .. subject)
local run, is_known = stored[1], stored[2]
local pool = is_known and decode(stored[2]) or new_pool()

-- Settings of the operator; 0: not set. `changed` is a server's time that rises with each change.
local SETTINGS, set = {'capacity', 'pool_rate', 'job_rate', 'small', 'express', 'changed'}, {}
for i, value in ipairs(call('HMGET', O, unpack(SETTINGS))) do
	set[SETTINGS[i]] = tonumber(value or 0) or 0
end

-- Return the operator's setting for one job or user; 0: not set.
local function set_for(kind, name, what)
	return set.changed > 0 and tonumber(call('HGET', O, kind .. ':' .. name .. ':' .. what) or 0) or 0
end

-- Fences and epochs come from the server's clock, so that they rise even if all data is lost. All other times come from
-- the pool's clock.
local server = server_ms()
local now = math.max(server + pool.ahead, pool.now)
local is_changed = now ~= pool.now or now - server ~= pool.ahead -- whether the pool must be written
local renew = now - pool.renewed > KEPT / 4 -- whether the keys' expiry must be set

-- Make the client repeat its call, in a new epoch. HDEL takes no memory, so this always succeeds.
local function start_over()
	call('HDEL', M, 'run')
	error('IOSHAPE-ANEW')
end

-- Mark the data as incomplete before the first write. If the server refuses a later command, the pool is half-written.
-- Then `run` names no server, and the next call begins a new epoch.
local is_marked
local function mark(...)
	if not is_marked then
		call(...)
		is_marked = true
	end
end

local function capacity()
	return math.max(set.capacity > 0 and set.capacity or pool.capacity, 1)
end

local function express()
	return set.express > 0 and set.express or EXPRESS
end

-- ---- Members: holders and waiters -------------------------------------------------------------------

local WAITING, HOLDING = 1, 2

-- Members by id: those that this call has read (false: the id is unknown), and those that it must write.
local members, to_write = {[subject] = stored[3] and decode(stored[3])}, {}

local function find_member(id)
	if members[id] == nil then
		local packed = call('HGET', M, 'm:' .. id)
		members[id] = packed and decode(packed)
	end
	return members[id]
end

local function must_find(id)
	return find_member(id) or start_over()
end

local function lease_until(key, id, deadline)
	call('ZADD', key, deadline, id)
	if deadline < pool.due then
		pool.due, is_changed = deadline, true
	end
end

-- ---- Jobs -------------------------------------------------------------------------------------------

local function forget_absent_jobs()
	local all = call('HGETALL', J)
	pool.tidied = now
	for i = 1, #all, 2 do
		local job = decode(all[i + 1])
		if job.busy ~= pool.busy or job.members == 0 then
			call('HDEL', J, all[i])
		end
	end
end

local function load_job(name)
	local packed = call('HGET', J, name)
	local job = packed and decode(packed)
	if not job then
		if now - pool.tidied > TIDIED and call('HLEN', J) >= MOST_JOBS then
			forget_absent_jobs()
		end
		job = new_job(pool.ms, pool.bytes)
	end
	if job.busy ~= pool.busy then
		job.busy, job.members = pool.busy, 0
		job.finish, job.latest, job.turn, job.small_finish = 0, 0, 0, 0
	end
	return job
end

local function store_job(name, job)
	renew = call('HSET', J, name, encode(job)) == 1 or renew
end

local function join(job, share)
	if job.members == 0 then
		job.share = share
		pool.shares = pool.shares + share
	end
	job.members = job.members + 1
end

-- Charge the job for its real use of the slot instead of the expected cost. `passed` is nil unless the holder reported
-- it. If it did, average times and speeds take this write into account.
local function charge(job, member, passed)
	local time = now - member.since
	local more = time * member.weight - member.cost
	job.finish = math.max(job.finish + more / member.share, 0)
	if member.given > 0 then
		pool.virtual = math.max(pool.virtual + more / pool.shares, pool.served)
	end
	if passed then
		job.usual = job.usual + (math.max(time, 1) - job.usual) * LEARNING
	end
	if passed and passed > 0 then
		-- Decaying sums instead of an average of speeds, because a small write says little about large ones.
		for _, known in ipairs({job, pool}) do
			known.ms = known.ms * (1 - LEARNING) + time
			known.bytes = known.bytes * (1 - LEARNING) + passed
		end
	end
end

-- ---- Coming and going -------------------------------------------------------------------------------

local function count_writer(target, more)
	local writers = string.byte(pool.targets, target)
	pool.targets = string.sub(pool.targets, 1, target - 1)
		.. string.char(math.max(math.min(writers + more, 255), 0)) .. string.sub(pool.targets, target + 1)
end

-- Spread writers over groups of storage targets: choose the next group after the latest, among those with the fewest
-- writers.
local function take_target(member)
	if #pool.targets ~= member.targets then -- the latest file had another number of groups
		pool.targets, pool.latest_target = string.rep('\0', member.targets), 0
	end
	local least, found = 0, nil
	while not found do
		local writers = string.char(least)
		found = string.find(pool.targets, writers, pool.latest_target + 1, true) or string.find(pool.targets, writers, 1, true)
		least = least + 1
	end
	member.target, pool.latest_target = found, found
	count_writer(found, 1)
end

local function count(member, more)
	if member.state == HOLDING then
		pool.holders, pool.used = pool.holders + more, pool.used + more * member.given
		pool.express_used = pool.express_used + (member.given == 0 and more or 0)
	else
		pool.waiters = pool.waiters + more
		pool.small_waiters = pool.small_waiters + (member.small_start and more or 0)
		pool.urgent_waiters = pool.urgent_waiters + (member.is_urgent and more or 0)
	end
end

-- Remove a member from its slot, or from the queue.
local function leave(id, member)
	count(member, -1)
	if member.state == WAITING then
		call('ZREM', Q, member.tag)
		call('ZREM', L, id)
		if member.small_start then
			call('ZREM', S, member.tag)
		end
	else
		call('ZREM', H, id)
		if member.target > 0 and #pool.targets == member.targets then
			count_writer(member.target, -1)
		end
	end
end

-- Remove a member, and update its job's use of the pool. `passed` is nil unless the holder reported it. A command that takes no
-- memory comes first, because a server without memory refuses the others unless the script has written before.
local function forget(id, member, passed)
	call('HDEL', M, 'm:' .. id, 'run')
	is_marked = true
	leave(id, member)
	members[id], to_write[id], is_changed = false, nil, true
	local job = load_job(member.job)
	if job.members == 0 then
		start_over()
	end
	if member.state == HOLDING then
		local bytes, time = passed or member.passed, now - member.since
		if member.cost > 0 then -- cost is 0 if the slot was reclaimed
			charge(job, member, passed)
		end
		job.writes = job.writes + 1
		for _, total in ipairs({job, pool}) do
			total.written, total.held = total.written + bytes, total.held + time
			total.waited = total.waited + member.waited
		end
	else
		job.finish = math.max(job.finish - member.cost / member.share, 0)
	end
	job.members = job.members - 1
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
	renew = renew or pool.holders == 0
	count(member, 1)
end

local function admit(id, member, given, until_then)
	pool.grants = pool.grants + 1
	pool.fence = math.max(pool.fence + 1, server * 1024)
	member.fence = pool.fence
	if given > 0 then
		-- Advance the virtual time as if all jobs that want slots were served at once, each by its share. It never
		-- falls below the floor of a granted request, because otherwise new jobs could pass old ones for ever.
		pool.served = math.max(pool.served, member.floor)
		pool.virtual = math.max(pool.virtual + member.cost / pool.shares, pool.served)
	else
		pool.small_virtual = math.max(pool.small_virtual + member.cost / pool.shares, member.small_start)
	end
	if member.targets > 1 then
		take_target(member)
	end
	hold(id, member, given, until_then)
end

-- Grant a slot to a waiter. Its lease is half as long until it sends a heartbeat: if the wake-up is lost, that comes
-- after a third of a lease.
local function grant(id, member, given)
	mark('HDEL', M, 'run')
	leave(id, member)
	admit(id, member, given, now + math.ceil(member.lease / 2))
	local wake = prefix .. 'w:' .. member.client
	-- If another program wrote a value of another type there, RPUSH fails: delete the key first. Any other error occurs
	-- again.
	if type(redis.pcall('RPUSH', wake, id)) == 'table' then
		call('DEL', wake)
		call('RPUSH', wake, id)
	end
	call('PEXPIRE', wake, member.lease)
end

-- A request for more slots than the capacity is admitted alone. One request with a deadline is admitted beside the
-- slots.
local function fits(weight, is_urgent)
	return pool.used == 0 or pool.used + weight <= capacity() or (is_urgent and pool.used <= capacity())
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
		if not fits(member.weight, member.is_urgent) then
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

-- ---- Beginning of each operation --------------------------------------------------------------------

-- Begin an epoch. Holders reclaim their slots with the next heartbeat, and new requests wait for them. How long depends
-- on whether there can be holders, and on the usual lease in this pool.
local function begin_epoch(current, uptime_s, is_usable)
	local usual = pool.lease > 0 and pool.lease or lease
	local had_holders = is_usable and (pool.holders > 0 or now - pool.now < usual)
	if not is_usable then
		local left = call('DEL', H, Q, S, L) > 0
		call('DEL', M, J)
		had_holders = known_epoch > 0 or left or (is_known and pool.holders > 0)
		for _, name in ipairs({
			'used', 'express_used', 'shares', 'holders', 'waiters', 'small_waiters', 'urgent_waiters'
		}) do
			pool[name] = 0
		end
		pool.targets, pool.free, members = '', {}, {}
		renew = true
		-- Fences must also exceed those given in this millisecond.
		pool.fence = math.max(pool.fence, (server + 1) * 1024)
	end
	pool.epoch = math.max(pool.epoch, known_epoch, server - 1) + 1
	pool.opened = now
	pool.grace = (had_holders and now or now - uptime_s * 1000) + math.ceil(usual / 2)
	run, is_marked = current, true
end

-- Check whether this server process wrote the data, and whether the data is complete.
local function check_data()
	-- A server that evicts keys may have dropped one; then the rest is useless. M always exists, so it replaces keys
	-- that need not exist.
	local is_held, is_queued, is_usable = pool.holders > 0, pool.waiters > 0, run and run ~= ''
	if is_usable and (is_held or is_queued) then
		is_usable = call('EXISTS', J, is_held and H or M, is_queued and Q or M, is_queued and L or M,
			pool.small_waiters > 0 and S or M) == 5
	end
	-- After a crash or a failover another process has only what was on its disk or was replicated to it. If all
	-- processes look alike (no address randomisation), a silence still reveals the change.
	local process = server_process()
	if not is_usable or process ~= pool.process or math.abs(server + pool.ahead - pool.now) >= GAP then
		local info = server_info()
		local current = string.match(info, 'run_id:(%w+)')
		pool.process, is_changed = process, true
		if not is_usable or run ~= current then
			begin_epoch(current, tonumber(string.match(info, 'uptime_in_seconds:(%d+)')), is_usable)
		end
	end
end

-- A status must not create a pool. If the pool is lost, or never existed, keys without a meaning may be left.
if operation == 'status' and not is_known then
	return {'now', server, 'set', {call('HGETALL', O)}}
end

-- A server without memory refuses commands that may take some, unless the script has written before. A status writes
-- nothing.
local is_look = operation == 'status'
if operation ~= 'acquire' then
	call('HDEL', M, '')
end

local function begin()
	check_data()
	pool.ahead, pool.now = now - server, now
	-- While the server was away no client could send a heartbeat, so leases end only after the grace.
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
end

-- ---- Answers: lists of names and values -------------------------------------------------------------

local function describe(member)
	return 'job ' .. member.job .. ', rank ' .. member.rank .. ' on ' .. member.node
end

local function answer_waiter(member)
	local position = call('ZRANK', Q, member.tag) or start_over()
	local beat, ahead = math.ceil(lease / 3), ''
	if position == 0 then
		-- The first waiter sends its heartbeat when the next lease of a holder ends.
		local first = call('ZRANGE', H, 0, 0, 'WITHSCORES')
		ahead = first[1] and describe(must_find(first[1])) or ''
		beat = math.max(1, math.min(beat, math.max(tonumber(first[2] or 0), pool.grace) - now))
	elseif position <= NEAR then
		ahead = describe(must_find(string.sub(call('ZRANGE', Q, position - 1, position - 1)[1], 17)))
	end
	return {
		'state', WAITING, 'epoch', pool.epoch, 'capacity', capacity(), 'beat', beat, 'position', position, 'ahead', ahead
	}
end

local function answer(member)
	if not member then
		return {'state', 0, 'epoch', pool.epoch, 'capacity', capacity()}
	elseif member.state == HOLDING then
		return {
			'state', HOLDING, 'epoch', pool.epoch, 'capacity', capacity(), 'beat', math.ceil(lease / 3),
			'fence', member.fence, 'weight', member.given, 'target', member.target
		}
	end
	return answer_waiter(member)
end

-- A client that asks about a known request is alive: renew its whole lease.
local function renewed(id, member)
	lease_until(member.state == HOLDING and H or L, id, now + lease)
	return answer(member)
end

-- ---- Operations -------------------------------------------------------------------------------------

-- Define only the operation of this call, because each function costs a sixth of a microsecond.
local operate

if operation == 'acquire' then
	local function expected_cost(job, bytes, weight)
		local time = job.usual
		if bytes > 0 then
			-- Without the limit, a job that announces far too much would push its own queued requests far back.
			time = math.min(1 + bytes * job.ms / job.bytes, math.max(BELIEVED, 8 * job.usual))
		end
		return time * weight
	end

	local function enqueue(id, member, score)
		pool.seq = pool.seq + 1
		member.state, member.since = WAITING, now
		member.tag = string.format('%016.0f', pool.seq) .. id
		mark('HSET', M, 'run', '') -- fails on a server without memory
		call('ZADD', Q, score, member.tag)
		lease_until(L, id, now + lease)
		members[id], to_write[id] = member, member
		if member.small_start then
			call('ZADD', S, member.small_start, member.tag)
			renew = renew or pool.small_waiters == 0
		end
		renew = renew or pool.waiters == 0
		count(member, 1)
	end

	local function share_of(job_name, user, own)
		local of_job, of_user = set_for('job', job_name, 'share'), set_for('user', user, 'share')
		return of_job > 0 and of_job or of_user > 0 and of_user or own
	end

	operate = function(client, node, job_name, rank, own_share, weight, bytes, asked, usual, user, urgent, boost)
		local id, member = subject, members[subject]
		pool.lease, is_changed = lease, true
		if member then
			return renewed(id, member)
		end
		weight, bytes, asked, usual = tonumber(weight), tonumber(bytes), tonumber(asked), tonumber(usual)
		local is_idle = pool.holders + pool.waiters == 0
		if is_idle or pool.capacity == 0 then -- either no member loses slots, or the number was lost
			pool.capacity, pool.by_job = asked > 0 and asked or usual, asked > 0 and 1 or 0
		end
		if is_idle then
			pool.busy = pool.busy + 1
			pool.virtual, pool.served, pool.small_virtual, pool.shares = 0, 0, 0, 0
		end
		local job, share = load_job(job_name), share_of(job_name, user, tonumber(own_share))
		local cost = expected_cost(job, bytes, weight)
		-- Start-time fair queueing: a request starts where its job's latest one ends, in virtual time. Requests of a
		-- turn count as if they started together, because checkpoints finish sooner than if jobs alternated slot by
		-- slot.
		local whole = capacity() / share
		boost = math.max(math.min(tonumber(boost), BOOST), -BOOST)
		-- A job that is present loses nothing while it waits for other jobs' turns, or because of its low boost.
		local credit = job.members > 0 and TURN - math.min(boost, 0) or 0
		local start = math.max(pool.virtual - credit * whole, job.finish, job.latest)
		if start <= pool.virtual or now - job.turn_began > TOGETHER or start - job.turn > TURN * whole then
			job.turn, job.turn_began = start, now
		end
		job.finish, job.latest, job.user = start + cost / share, start, user
		join(job, share)
		member = {
			job = job_name, node = node, rank = rank, client = client, share = share, weight = weight, bytes = bytes,
			lease = lease, cost = cost, passed = 0, targets = math.min(usual, MOST_TARGETS), target = 0,
			is_urgent = urgent == '1'
		}
		local score, told = member.is_urgent and URGENT or job.turn - boost * whole, nil
		member.floor = math.min(job.turn, score)
		if now >= pool.grace and pool.waiters == 0 and fits(weight, member.is_urgent) then
			admit(id, member, weight, now + lease)
			told = answer(member)
		else
			if weight == 1 and bytes > 0 and bytes <= (set.small > 0 and set.small or SMALL_BYTES) then
				member.small_start = math.max(pool.small_virtual, job.small_finish)
				job.small_finish = member.small_start + cost / share
			end
			enqueue(id, member, score)
			grant_those_that_fit()
			told = member.state == HOLDING and renewed(id, member) or answer(member)
		end
		store_job(job_name, job)
		return told
	end

elseif operation == 'beat' then
	operate = function(passed, is_holding, fence, given, bytes, client, node, job_name, rank, share)
		local id, member = subject, members[subject]
		passed = tonumber(passed)
		-- Give a slot of an earlier epoch back to its holder. That holds for a lease after the epoch began, because a
		-- lease renewed just before the loss would last as long.
		if is_holding == '1' and known_epoch ~= pool.epoch and now < pool.opened + lease
			and not (member and member.state == HOLDING) then
			if member then
				forget(id, member)
			end
			given, share = tonumber(given), tonumber(share)
			member = {
				job = job_name, node = node, rank = rank, client = client, share = share, weight = math.max(given, 1),
				bytes = tonumber(bytes), lease = lease, cost = 0, passed = passed, fence = tonumber(fence),
				targets = 0, target = 0
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
	-- An operator who takes a slot away passes no `passed`.
	operate = function(passed)
		if not members[subject] then
			return 0
		end
		forget(subject, members[subject], passed and tonumber(passed))
		grant_those_that_fit()
		return 1
	end

elseif operation == 'pace' then
	local function lower(a, b)
		return a > 0 and b > 0 and math.min(a, b) or math.max(a, b)
	end

	-- Grant the bytes that are asked for, or more, up to the usual length of a grant. `most` is what is left to write.
	operate = function(bytes, most, own_rate, user)
		local job_rate = lower(lower(tonumber(own_rate), set.job_rate), set_for('job', subject, 'rate'))
		local rates = {
			pool = set.pool_rate, ['job:' .. subject] = job_rate, ['user:' .. user] = set_for('user', user, 'rate')
		}
		local rate, start, free = 0, now, {}
		for _, limit in pairs(rates) do
			rate = lower(rate, limit)
		end
		if rate == 0 then
			return {'bytes', 0, 'start', 0, 'end', 10000}
		end
		-- Bandwidth that was granted in advance at earlier rates is not charged.
		for name, time in pairs(pool.paced == set.changed and pool.free or {}) do
			free[name] = time > now and time or nil
		end
		local writers = math.min(math.max(pool.holders, 1), PACE_WRITERS)
		bytes = math.max(tonumber(bytes), math.min(tonumber(most), math.floor(rate * PACE_MS / 1000 / writers)))
		for name, limit in pairs(rates) do
			start = math.max(start, limit > 0 and free[name] or 0)
		end
		for name, limit in pairs(rates) do
			if limit > 0 then
				free[name] = start + bytes * 1000 / limit
			end
		end
		pool.free, pool.paced, is_changed = free, set.changed, true
		return {
			'bytes', bytes, 'start', math.floor(start - now), 'end', math.ceil(start - now + bytes * 1000 / rate)
		}
	end

elseif operation == 'alarm' then
	operate = function(bits, user)
		local job = load_job(subject)
		job.user = user
		for i, rule in ipairs(ALARMS) do
			if math.floor(tonumber(bits) / 2 ^ (i - 1)) % 2 == 1 then
				job[rule] = (job[rule] or 0) + 1
			end
		end
		store_job(subject, job)
		return 1
	end

elseif operation == 'set' then
	-- Take names and values; the value 0 clears a setting.
	operate = function(...)
		local given = {...}
		for i = 1, #given, 2 do
			local name, value = string.sub(given[i], 1, MOST_NAME), tonumber(given[i + 1])
			if value == 0 then
				call('HDEL', O, name)
			elseif call('HGET', O, name) or call('HLEN', O) < MOST_SET then
				call('HSET', O, name, value)
			else
				return 0
			end
			set[name] = value
		end
		set.changed = math.max(server, set.changed + 1)
		call('HSET', O, 'changed', set.changed)
		-- Settings of the operator do not expire until they are cleared.
		if call('HLEN', O) > 1 then
			call('PERSIST', O)
		else
			call('PEXPIRE', O, KEPT)
		end
		grant_those_that_fit()
		return 1
	end

elseif is_look then
	local MEMBER = {'job', 'node', 'rank', 'weight', 'bytes', 'passed', 'state', 'given', 'fence', 'since', 'is_urgent'}
	local JOB = {'user', 'written', 'writes', 'held', 'waited', unpack(ALARMS)}
	local POOL = {'capacity', 'by_job', 'used', 'grants', 'waiters', 'written', 'held', 'waited'}

	-- Append the named fields of a table to a row, and return the row.
	local function add(row, from, names)
		for _, name in ipairs(names) do
			row[#row + 1] = name
			row[#row + 1] = from[name] or 0
		end
		return row
	end

	-- List waiters in their order, and all other rows in any order: Python sorts them (_slots/redis_pools.py).
	operate = function()
		local held, queue, jobs = call('ZRANGE', H, 0, -1, 'WITHSCORES'), call('ZRANGE', Q, 0, LISTED - 1), call('HGETALL', J)
		local holders, waiters, job_rows = {}, {}, {}
		for i = 1, #held, 2 do
			holders[#holders + 1] = add({'id', held[i], 'until', held[i + 1]}, must_find(held[i]), MEMBER)
		end
		for _, tag in ipairs(queue) do
			local id = string.sub(tag, 17)
			waiters[#waiters + 1] = add({'id', id, 'until', call('ZSCORE', L, id) or now}, must_find(id), MEMBER)
		end
		for i = 1, #jobs, 2 do
			job_rows[#job_rows + 1] = add({'job', jobs[i]}, decode(jobs[i + 1]), JOB)
		end
		return {
			'now', now, 'set', {call('HGETALL', O)}, 'pool', {add({}, pool, POOL)}, 'holders', holders,
			'waiters', waiters, 'jobs', job_rows
		}
	end
end

-- ---- End of each operation --------------------------------------------------------------------------

begin()
local result
if not is_look then
	result = operate(unpack(ARGV, 5))
end
local fields = is_marked and {'run', run} or {}
for id, member in pairs(to_write) do
	fields[#fields + 1] = 'm:' .. id
	fields[#fields + 1] = encode(member)
end
if is_changed or renew then
	pool.renewed = renew and now or pool.renewed
	fields[#fields + 1] = 'pool'
	fields[#fields + 1] = encode(pool)
end
if #fields > 0 then
	call('HSET', M, unpack(fields))
end
if renew then
	for _, key in ipairs({M, H, Q, S, L, J}) do
		call('PEXPIRE', key, KEPT)
	end
end
-- The user of a status may have no right to further commands. By now everything is written.
return is_look and operate(unpack(ARGV, 5)) or result
