-- SPDX-License-Identifier: Apache-2.0
-- Begin an epoch after data may have been lost. A part of slots.lua, which includes this file.

-- Begin an epoch. Holders of slots show up within a heartbeat and are let in first. The wait for them depends on whether
-- there can have been any, and on the lease that is usual in this pool.
local function begin_epoch(current, uptime_s, is_usable)
	local usual = pool.lease > 0 and pool.lease or lease
	local had_holders = is_usable and (pool.holders > 0 or now - pool.now < usual)
	if not is_usable then
		local left, kept = call('DEL', H, Q, S, L) > 0, call('HMGET', M, 'set', 'limits')
		call('DEL', M, J)
		for i, name in ipairs({'set', 'limits'}) do
			if kept[i] then
				call('HSET', M, name, kept[i])
			end
		end
		had_holders = known_epoch > 0 or left or (is_known and pool.holders > 0)
		for _, name in ipairs({
			'used', 'express_used', 'shares', 'holders', 'waiters', 'small_waiters', 'urgent_waiters', 'free', 'renewed'
		}) do
			pool[name] = 0
		end
		pool.targets, members = '', {}
		-- Above the fences given in this millisecond, too.
		pool.fence = math.max(pool.fence, (server + 1) * 1024)
	end
	pool.epoch = math.max(pool.epoch, known_epoch, server - 1) + 1
	pool.opened = now
	pool.grace = (had_holders and now or now - uptime_s * 1000) + math.ceil(usual / 2)
	run, is_marked = current, true
end

-- Find out whether this server process wrote the data, and whether all of it is there.
local function check_data()
	-- A server that evicts keys may have dropped one. The rest is then worth nothing. M stands for keys that need not exist.
	local is_held, is_queued, is_usable = pool.holders > 0, pool.waiters > 0, run and run ~= ''
	if is_usable and (is_held or is_queued) then
		is_usable = call('EXISTS', J, is_held and H or M, is_queued and Q or M, is_queued and L or M,
			pool.small_waiters > 0 and S or M) == 5
	end
	-- After a crash or a failover another process has what was on its disk, or what it had been sent. If all processes look
	-- alike (no random addresses), a silence reveals it.
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
