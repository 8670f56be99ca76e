-- prefix, owner, after or '', limit. Newest first; one row more than the limit shows that there are more.
local list = list_key(ARGV[2])
local first = 0
if ARGV[3] ~= '' then
  local rank = redis.call('ZREVRANK', list, ARGV[3])
  if not rank then return {} end
  first = rank + 1
end
local rows = {}
for _, id in ipairs(redis.call('ZREVRANGE', list, first, first + tonumber(ARGV[4]))) do
  local row = redis.call('HMGET', conversation_key(id), 'owner', 'created', 'updated', 'rev', 'leaf', 'active', 'metadata')
  rows[#rows + 1] = {id, row[1], row[2], row[3], row[4], row[5] or '', row[6] or '', row[7]}
end
return rows
