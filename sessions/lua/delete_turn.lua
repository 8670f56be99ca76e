-- prefix, id, owner, now
local id = ARGV[2]
local key = turn_key(id)
if field(key, 'owner') ~= ARGV[3] or field(key, 'deleted') ~= '' then return 0 end
local conversation = field(key, 'conv')
local above = remove_turn(id)
if conversation ~= '' and redis.call('EXISTS', conversation_key(conversation)) == 1 then
  local conv = conversation_key(conversation)
  if field(conv, 'leaf') == id then redis.call('HSET', conv, 'leaf', above) end
  if field(conv, 'active') == id then redis.call('HDEL', conv, 'active') end
  touch(conversation, ARGV[4])
end
return 1
