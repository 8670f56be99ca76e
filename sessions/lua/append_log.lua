-- prefix, id, log ttl, most entries, then pairs: number of the last event in the entry, the entry.
-- Stream ids are event numbers, so what is sent twice is refused the second time.
local id = ARGV[2]
local key = log_key(id)
if redis.call('EXISTS', turn_key(id)) == 0 then return 0 end
local top = -1
local newest = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)
if newest[1] then top = tonumber(string.match(newest[1][1], '^(%d+)')) - 1 end
for index = 5, #ARGV, 2 do
  local last = tonumber(ARGV[index])
  if last > top then
    redis.call('XADD', key, 'MAXLEN', '~', ARGV[4], string.format('%d-0', last + 1), 'e', ARGV[index + 1])
    top = last
  end
end
redis.call('EXPIRE', key, ARGV[3])
if field(turn_key(id), 'cancel') ~= '' then return 1 end
return 0
