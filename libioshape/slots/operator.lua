-- SPDX-License-Identifier: Apache-2.0
-- Operations of operators: set, limit, kick, status. A part of slots.lua, which includes this file.

local LISTED = 256 -- holders, and waiters, in a status
local LISTED_JOBS = 64 -- in a status
local MOST_LIMITS = 64 -- of single jobs and users
local MOST_NAME = 64 -- bytes

if operation == 'set' or operation == 'limit' then
	local function change(clear, slots, pool_rate, job_rate, small, beside)
		for name, given in pairs({
			capacity = slots, pool_rate = pool_rate, job_rate = job_rate, small = small, express = beside
		}) do
			local value = tonumber(given)
			set[name] = (value > 0 or clear) and value or set[name]
		end
		return clear or tonumber(pool_rate) + tonumber(job_rate) > 0
	end

	local function limit(clear, kind, name, share, rate)
		name, share, rate = string.sub(name, 1, MOST_NAME), tonumber(share), tonumber(rate)
		local key, found = kind .. ':' .. name, limit_of(kind, name)
		limits = limits or {}
		set.limits = set.limits - (found and 1 or 0)
		if clear then
			limits[key] = nil
		elseif set.limits == MOST_LIMITS then
			return nil
		else
			set.limits = set.limits + 1
			limits[key] = {
				share = share > 0 and share or found and found.share or 0,
				rate = rate > 0 and rate or found and found.rate or 0, free = 0
			}
		end
		call('HSET', M, 'limits', encode(limits))
		return true
	end

	operate = function(clear, ...)
		local is_new_rate = (operation == 'set' and change or limit)(clear == '1', ...)
		if is_new_rate == nil then
			return 0
		elseif is_new_rate then
			-- What was given in advance at the old rates is owed by nobody.
			pool.free, pool.paces = operation == 'set' and 0 or pool.free, pool.paces + 1
		end
		set.changed = server
		call('HSET', M, 'set', encode(set))
		pool.renewed, is_changed = 0, true
		grant_those_that_fit()
		return 1
	end

elseif operation == 'kick' then
	operate = function()
		if not members[subject] then
			return 0
		end
		forget(subject, members[subject])
		grant_those_that_fit()
		return 1
	end

elseif is_look then
	-- In the last 60 s, if those of the minute before came evenly.
	local function grants_last_minute()
		local minute, left = math.floor(now / 60000), 1 - now % 60000 / 60000
		local granted = minute == pool.minute and pool.this_minute + pool.last_minute * left
			or minute == pool.minute + 1 and pool.this_minute * left or 0
		return math.floor(granted + 0.5)
	end

	-- List the jobs that wrote most, with what they have written in the slots that they hold.
	local function job_rows(holders)
		local all, jobs, held, rows = call('HGETALL', J), {}, {}, {}
		for _, holder in ipairs(holders) do
			held[holder.member.job] = (held[holder.member.job] or 0) + holder.member.passed
		end
		for i = 1, #all, 2 do
			local job = decode(all[i + 1])
			job.name, job.written = all[i], job.written + (held[all[i]] or 0)
			jobs[#jobs + 1] = job
		end
		table.sort(jobs, function(a, b)
			return a.written > b.written or (a.written == b.written and a.name < b.name)
		end)
		for i = 1, math.min(#jobs, LISTED_JOBS) do
			local job = jobs[i]
			rows[i] = {
				'job', job.name, 'user', job.user, 'written', job.written, 'writes', job.writes, 'held', job.held,
				'waited', job.waited
			}
		end
		return rows
	end

	local function member_row(id, member, deadline)
		return {
			'id', id, 'job', member.job, 'node', member.node, 'rank', member.rank, 'weight', member.weight,
			'express', member.state == HOLDING and member.given == 0 and 1 or 0, 'bytes', member.bytes,
			'passed', member.passed, 'fence', member.fence or 0, 'since', now - member.since,
			'lease', (deadline or 0) - now, 'urgent', member.is_urgent and 1 or 0
		}
	end

	local function limit_rows()
		local rows = {}
		limit_of('', '')
		for key, limit in pairs(limits or {}) do
			local kind, name = string.match(key, '^(%a+):(.*)$')
			rows[#rows + 1] = {kind, name, 'share', limit.share, 'rate', limit.rate}
		end
		table.sort(rows, function(a, b)
			return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2])
		end)
		return rows
	end

	-- Holders are listed oldest first, waiters next one first, jobs by what they wrote.
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
			holders[i] = member_row(all[i].id, all[i].member, all[i].deadline)
		end
		for i, tag in ipairs(queue) do
			local id = string.sub(tag, 17)
			waiters[i] = member_row(id, must_find(id), call('ZSCORE', L, id))
		end
		return {
			'capacity', set.capacity + pool.capacity > 0 and capacity() or tonumber(usual),
			'by', set.capacity > 0 and 'operator' or pool.by_job > 0 and 'job' or 'default', 'used', pool.used,
			'pool_rate', set.pool_rate, 'job_rate', set.job_rate,
			'small', set.small > 0 and set.small or SMALL_BYTES, 'express', express(), 'changed', set.changed,
			'grants', pool.grants, 'grants_last_minute', grants_last_minute(), 'waiter_count', pool.waiters,
			'holder_count', pool.holders, 'written', pool.written, 'held', pool.held, 'waited', pool.waited,
			'holders', holders, 'waiters', waiters, 'jobs', job_rows(all), 'limits', limit_rows()
		}
	end
end
