-- prefix, id, turn ttl, most turns, own worker. Reads a turn and all above it, and puts off their expiry.
local rows = {}
local id = ARGV[2]
while id ~= '' and #rows < tonumber(ARGV[4]) do
  local key = turn_key(id)
  local row = redis.call('HMGET', key, 'owner', 'parent', 'conv', 'status', 'deleted', 'head', 'tail')
  if not row[1] then
    if #rows > 0 then return {} end
    break
  end
  local orphaned = '0'
  if row[4] == 'in_progress' and not has_worker(key, ARGV[5]) then orphaned = '1' end
  rows[#rows + 1] = {id, row[1], row[2], row[3], row[5] or '', orphaned, row[6], row[7]}
  if redis.call('TTL', key) >= 0 then redis.call('EXPIRE', key, ARGV[3]) end
  id = row[2]
end
return rows
