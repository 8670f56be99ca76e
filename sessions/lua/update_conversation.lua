-- prefix, id, owner, expected rev or '', metadata, now
local key = conversation_key(ARGV[2])
if field(key, 'owner') ~= ARGV[3] then return {'missing', 0} end
local rev = tonumber(field(key, 'rev'))
if ARGV[4] ~= '' and tonumber(ARGV[4]) ~= rev then
  -- Sent twice is done once.
  if tonumber(ARGV[4]) == rev - 1 and field(key, 'metadata') == ARGV[5] then return {'updated', rev} end
  return {'conflict', rev}
end
redis.call('HSET', key, 'metadata', ARGV[5])
return {'updated', touch(ARGV[2], ARGV[6])}
